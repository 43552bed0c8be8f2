"""The environment of child processes that run this package."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path


def same_code() -> dict[str, str]:
    """Environment variables with which a child imports this very package.

    `python -m speedrun` would otherwise look into the current folder first, where another checkout
    may lie: a race would measure that one's code.
    """
    root = str(Path(__file__).resolve().parents[1])
    searched = os.environ.get("PYTHONPATH", "")
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    if root not in installed:  # which Python searches anyway, after its own library
        searched = os.pathsep.join(filter(None, (root, searched)))
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": searched}
