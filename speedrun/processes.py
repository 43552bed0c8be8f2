"""The environment of child processes that run this package."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

OF_A_COMMAND = "SPEEDRUN_OF_A_COMMAND"  # set where a race or the like starts a run


def same_code() -> dict[str, str]:
    """Environment variables with which a child imports this very package, and hashes alike.

    `python -m speedrun` would otherwise look into the current folder first, where another checkout
    may lie: a race would measure that one's code. Of hashes `__main__.py` says more.
    """
    root = str(Path(__file__).resolve().parents[1])
    searched = os.environ.get("PYTHONPATH", "")
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    if root not in installed:  # which Python searches anyway, after its own library
        searched = os.pathsep.join(filter(None, (root, searched)))
    hashes = os.environ.get("PYTHONHASHSEED", "0")
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": searched, "PYTHONHASHSEED": hashes}
