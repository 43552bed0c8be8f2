"""The keys of the schema: which there are, which may be set, what each of them says.

A key is a path such as `model.layers`. Arguments of code that a recipe names are keys as well, of
which no schema can know. `optimizer.hidden.betas[0]` is a number in a list: overrides set it, and
searches search it, by that name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from speedrun.config.code import WORKED_OUT, code_tables
from speedrun.config.experiment import all_values
from speedrun.config.fields import Technique
from speedrun.config.schema import MOVED, Config
from speedrun.errors import ConfigError, quoted


def schema_fields(
    model: type[BaseModel] = Config, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the schema with its declaration."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from schema_fields(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


@cache
def describe() -> dict[str, str]:
    """Every key of the schema with its description."""
    return {key: info.description or "" for key, info in schema_fields()}


ELEMENT = re.compile(r"([^\[\]]+)\[([0-9]{1,4})\]")
CODE_TABLES = tuple(code_tables(Config))


def is_argument(key: str) -> bool:
    """Whether a key is an argument of code that a recipe names, which no schema can know."""
    return any(key.startswith(f"{table}.args.") for table in CODE_TABLES)


def whole(key: str) -> str:
    """The key of the list that an element is in; any other key itself."""
    return found[1] if (found := ELEMENT.fullmatch(key)) else key


def with_elements(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by key, and beside each list of numbers its elements."""
    return dict(values) | {
        f"{key}[{at}]": one
        for key, listed in values.items()
        if isinstance(listed, list | tuple)
        for at, one in enumerate(listed)
        if isinstance(one, int | float) and not isinstance(one, bool)
    }


def with_lists(layer: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Values by key with each element in its list: one of the layer itself, or of those below."""
    found = {key: value for key, value in layer.items() if whole(key) == key}
    for key, value in layer.items():
        if (name := whole(key)) == key:
            continue
        listed = found.get(name, below.get(name))
        at = int(key[len(name) + 1 : -1])
        if not isinstance(listed, list | tuple) or at >= len(listed):
            raise ConfigError(
                f"{quoted(key)} cannot be set: {name} is no list with so many elements here; "
                "state the whole list"
            )
        found[name] = [value if n == at else one for n, one in enumerate(listed)]
    return found


def settable(key: str) -> bool:
    """Whether a file or a user may set a key of the schema; some follow from others."""
    table, _, last = key.rpartition(".")
    return table not in CODE_TABLES or last not in WORKED_OUT


def techniques(config: Config) -> dict[str, dict[str, Any]]:
    """The techniques a config has by name, each with the values by key that take it out."""
    values = all_values(config)
    found: dict[str, dict[str, Any]] = {
        mark.name: {key: mark.off, **mark.also}
        for key, info in schema_fields()
        for mark in info.metadata
        if isinstance(mark, Technique)
        and (values[key] != mark.off if mark.on is None else values[key] == mark.on)
    }
    for part, used in config.custom:
        if used.use:
            found[f"custom {part} {used.named.name}"] = {f"custom.{part}.use": ""}
    return found


def check_known(key: str, origin: str) -> None:
    """Refuse a key that is no setting; `origin` says where it stands."""
    known = describe()
    if key in ("recipe", "track"):
        raise ConfigError(f"{key!r} ({origin}) is the {key}'s name, not a setting: leave it out")
    table, _, last = key.rpartition(".")
    if not settable(key):
        raise ConfigError(f"{key!r} ({origin}) follows from {table}.use: leave it out")
    if key in known or is_argument(key):
        return
    if key in MOVED:
        raise ConfigError(f"{key!r} ({origin}) is now called {MOVED[key]!r}: write that")
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside:
        raise ConfigError(f"{key!r} ({origin}) is a table; set one of {', '.join(inside)}")
    same_last = [name for name in known if name.rpartition(".")[2] == last]
    near = get_close_matches(key, same_last or known, n=1, cutoff=0.0)
    raise ConfigError(f"unknown key {quoted(key)} ({origin}); nearest known: {near[0]!r}")
