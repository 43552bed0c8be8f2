"""Files that outlast a crash: whole or not there, forced to disk, known by their hash.

A run or a build can be killed at any instant and the machine can lose power, so whatever replaces
a file goes through `write_atomically`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from speedrun.errors import SpeedrunError


class NoHomeError(SpeedrunError, RuntimeError):
    """There is nowhere to keep things; a RuntimeError too, as it is to `Path.expanduser`."""


def cache_home() -> Path:
    """Where datasets and compiled kernels are kept: $SPEEDRUN_HOME, or ~/.cache/speedrun."""
    try:
        return Path(os.environ.get("SPEEDRUN_HOME") or "~/.cache/speedrun").expanduser()
    except RuntimeError:  # no HOME, and a user whom the system does not know
        raise NoHomeError(
            "this user has no home folder to keep datasets and kernels in: set SPEEDRUN_HOME to a "
            "folder that can be written"
        ) from None


def elsewhere(path: Path) -> str:
    """What to do where `path` cannot be written."""
    with suppress(NoHomeError):
        if path.absolute().is_relative_to(cache_home().absolute()):
            return "free some space there, or set SPEEDRUN_HOME to a folder that can be written"
    return "free some space or choose another folder"


def flush(path: Path) -> None:
    """Force a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(
    path: Path, data: bytes | bytearray, error: type[SpeedrunError] = SpeedrunError
) -> None:
    """Make `path` appear whole or not at all, even if the machine stops midway."""
    temporary = path.parent / f"{path.name}.tmp"  # of a folder such as . too, which has no name
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            # A device or a pipe takes what is written to it. A file in the place of /dev/null would
            # be one for the whole machine.
            with path.open("wb") as file:
                file.write(data)
            return
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as problem:
        with suppress(OSError):  # nor can it be removed, or even looked for
            temporary.unlink(missing_ok=True)
        raise error(f"cannot write {path}: {problem.strerror}; {elsewhere(path)}") from problem


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON, with null for what is not finite."""
    write_atomically(path, (json.dumps(finite(value), indent=2) + "\n").encode())


def parse_json(data: str | bytes) -> Any:
    """What a JSON text says; whatever is none is a ValueError."""
    try:
        # json.loads would read bytes of other encodings too, and halves of pairs among them.
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        found = json.loads(text)
        # An escape can still stand for half of a pair, which nothing could write as UTF-8 again.
        if "\\u" in text or isinstance(data, str):
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("it has half of a surrogate pair, which UTF-8 cannot hold") from None
    return found


def finite(value: Any) -> Any:
    """`value` with None for every NaN and infinity in it, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def has_sha256(path: Path, digest: str) -> bool:
    """Whether the file is there and holds what it should."""
    return path.is_file() and sha256_of(path) == digest
