"""Code of users' own that a config names (config/code.py): what it is called, where it lies.

A run keeps copies of the files it names, so that it can be resumed, sampled and checked when the
originals have changed or are gone. A config that was read from a run finds its files there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from speedrun.config.code import copy_of, found, hash_here
from speedrun.config.schema import Config


def own_code(config: Config) -> dict[str, str]:
    """All of it by table, by name and hash as people read it."""
    return {table: used.text for table, used in config.used_code().items()}


def own_code_text(config: Config) -> str:
    """In one line; empty where there is none."""
    return ", ".join(f"{table} {text}" for table, text in own_code(config).items())


def say_own_code(config: Config) -> None:
    """On stderr, before it runs: whoever looks at a run of somebody else's is to know."""
    parts = {f"custom.{part}": used.text for part, used in config.custom if used.use}
    if parts:
        _say_once(", ".join(f"{part} {text}" for part, text in parts.items()))


@cache
def _say_once(code: str) -> None:
    print(f"speedrun: code of the run's own is run here, too: {code}", file=sys.stderr)


def with_code(config: Config, changes: Mapping[str, Mapping[str, str]]) -> Config:
    """With other places or hashes of code, by table."""
    for table, values in changes.items():
        section, name = table.split(".")
        tables = getattr(config, section)
        used = getattr(tables, name).model_copy(update=dict(values))
        config = config.model_copy(update={section: tables.model_copy(update={name: used})})
    return config


def with_copies(config: Config, copies: Path) -> Config:
    """With every file where a run has its own copy of it, if it has one."""
    places = {
        table: copy_of(used, copies)
        for table, used in config.used_code().items()
        if used.named.is_file
    }
    return with_code(config, {
        table: {"place": str(path.parent.resolve())}
        for table, path in places.items()
        if path.exists()
    })  # fmt: skip


def with_originals(config: Config, copies: Path, before: Config) -> Config:
    """The other way round: copies of a run are where `before` says the files were."""
    known = before.used_code()
    return with_code(config, {
        table: {"place": known[table].place}
        for table, used in config.used_code().items()
        if table in known and Path(used.place) == copy_of(used, copies).parent.resolve()
    })  # fmt: skip


def with_installed(config: Config) -> Config:
    """With the hashes that packages have here now: another one makes it another experiment."""
    return with_code(config, {
        table: {"code": found(used.use, Path())["code"]}
        for table, used in config.used_code().items()
        if not used.named.is_file
    })  # fmt: skip


def changed_since(config: Config) -> list[str]:
    """A sentence for each file that is not what it was when a config named it."""
    sentences = []
    for used in config.used_code().values():
        if used.named.is_file and (here := hash_here(used)) != used.code:
            sentences.append(
                f"{Path(used.place) / used.named.where} {'was changed' if here else 'is gone'} "
                f"since the run began, which goes on with its own copy of it ({used.code[:12]})"
            )
    return [*dict.fromkeys(sentences)]  # a file may have several of them
