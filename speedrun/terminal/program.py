"""Commands to type next, which work as they stand."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


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
