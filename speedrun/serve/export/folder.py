"""The folder of an export: whole or not there, and never in the place of anything else.

It is written beside its place under a hidden name, read back, and renamed. What stands there before
is replaced only if it is an earlier export, whose own list of files says that nothing was added.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from speedrun.errors import ConfigError, SpeedrunError
from speedrun.files import finite, flush, parse_json, sha256_of

FACTS = "speedrun.json"
KIND = "speedrun export"


def refuse_if_taken(out: Path, *, force: bool) -> None:
    """A folder that is not there, is empty, or is an export that may be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir():
        raise ConfigError(f"{out} is a file: name a folder to write")
    written = files_of_export(out)
    if written is None:
        raise ConfigError(f"{out} is not empty and holds no export: choose another folder")
    added = [path.name for path in sorted(out.iterdir()) if path.name not in written]
    if added:
        raise ConfigError(
            f"{out} holds {added[0]}, which export did not write: move it away, or choose another "
            "folder"
        )
    if not force:
        raise ConfigError(f"{out} holds an export: replace it with --force, or choose another")


def files_of_export(folder: Path) -> set[str] | None:
    """The names an earlier export wrote there; None: it is none."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        facts = parse_json((folder / FACTS).read_bytes())
        if facts["kind"] == KIND:
            return {FACTS, *facts["files"]}
    return None


def write_folder(
    out: Path, facts: dict[str, Any], fill: Callable[[Path], None], *, force: bool
) -> int:
    """`fill` a folder, add the facts and put it in its place; gives its size in bytes."""
    out = out.resolve()
    refuse_if_taken(out, force=force)
    partial: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        fill(partial)
        files = {path.name: sha256_of(path) for path in sorted(partial.iterdir())}
        whole = {"kind": KIND, **facts, "files": files}
        (partial / FACTS).write_text(json.dumps(finite(whole), indent=2) + "\n", encoding="utf-8")
        mask = _umask()
        for path in partial.iterdir():
            path.chmod(0o666 & ~mask)  # safetensors are written for their owner alone
            flush(path)
        partial.chmod(0o777 & ~mask)
        size = sum(path.stat().st_size for path in partial.iterdir())
        _put(partial, out, force=force)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpeedrunError(
            f"cannot write {out}: {reason}; free some space or choose another folder"
        ) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)  # what was renamed is not there any more
    return size


def _put(partial: Path, out: Path, *, force: bool) -> None:
    refuse_if_taken(out, force=force)  # something may have come there in the meantime
    old: Path | None = None
    if out.exists() and any(out.iterdir()):
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
        out.rename(old)  # onto the empty folder just made, so its name is nobody else's
    try:
        partial.rename(out)
    except OSError:
        if old is not None:
            old.rename(out)
        raise
    flush(out.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    """Reading it means setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
