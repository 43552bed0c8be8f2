"""Kernels that a platform wheel brings along (tools/packaging/kernels.py makes them).

They name no OpenMP library: torch has one loaded under whatever name its wheel gave it, and the
calls bind to that. So torch has to be imported first, which this package's __init__ does.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from pathlib import Path

from speedrun.files import has_sha256
from speedrun.model.native import cpu
from speedrun.model.native.build import HERE, sources_sha256

FOLDER = HERE / "prebuilt"


@dataclass(frozen=True)
class Found:
    """A loaded library, how it came to be, why it is this one, and what a user should know."""

    library: ctypes.CDLL
    built: str
    why: str
    note: str = ""


def find_prebuilt(asked: str) -> Found | str:
    """The best one for this CPU, or the one of the level asked for; or why there is none."""
    try:
        told = json.loads((FOLDER / "manifest.json").read_text())
        sources, compiler = str(told["sources"]), str(told["compiler"])
        digests = {str(level): str(digest) for level, digest in told["libraries"].items()}
    except (FileNotFoundError, NotADirectoryError):
        return "no kernels came prebuilt with this installation"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"the list of prebuilt kernels in {FOLDER} is damaged"
    if sources != sources_sha256():
        return "the prebuilt kernels are of other sources than those installed"
    refused = []
    for level in cpu.LEVELS:
        if level not in digests or asked not in ("1", level):
            continue
        missing = cpu.lacking(level)
        if missing:
            refused.append(f"this CPU is no {level}, it lacks {', '.join(sorted(missing))}")
        elif missing is None and asked != level:
            refused.append(f"{cpu.CPUINFO} does not say whether this CPU is an {level}")
        elif isinstance(library := _load(FOLDER / f"{level}.so", digests[level]), str):
            refused.append(library)
        else:
            why = "; ".join(refused) or f"this CPU is an {level}"
            return Found(library, f"prebuilt for {level} by {compiler}", why)
    return "; ".join(refused) or f"no kernels for {asked} came prebuilt"


def _load(library: Path, digest: str) -> ctypes.CDLL | str:
    try:
        if not has_sha256(library, digest):  # to load a damaged one is a crash
            return f"{library} is damaged"
        return ctypes.CDLL(str(library))
    except OSError as error:
        return f"{library.name} does not load: {error}"
