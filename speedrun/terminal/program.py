"""Commands to type next, which work as they stand."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from speedrun.config.resolve import parse_override, toml_text
from speedrun.errors import ConfigError


def program() -> list[str]:
    """The program as it was called: by its name where a shell finds it, else by its path."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return [sys.executable, "-m", "speedrun"]
    if called.name == "speedrun":
        found = shutil.which("speedrun")
        if found is None or not called.exists() or not called.samefile(found):
            return [str(called)]
    return ["speedrun"]


def command(*words: str) -> str:
    return shlex.join([*program(), *words])


def override(key: str, text: str) -> str:
    """`key=text`, in quotes where it would be read as something else than a text."""
    plain = f"{key}={text}"
    try:
        return plain if parse_override(plain)[1] == text else f"{key}={toml_text(text)}"
    except ConfigError:
        return f"{key}={toml_text(text)}"
