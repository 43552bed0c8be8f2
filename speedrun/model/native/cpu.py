"""What this CPU can do, so that nothing is loaded that it cannot run: it would kill us."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# Names that compilers know, the best first, with what they need in the words of /proc/cpuinfo.
LEVELS: Mapping[str, frozenset[str]] = {"x86-64-v4": _V4, "x86-64-v3": _V3}


def facts() -> frozenset[str]:
    """The lines of /proc/cpuinfo that say what the CPUs are; none where it cannot be read."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(x for x in lines if x.startswith(("model name", "flags", "Features")))


def lacking(level: str) -> frozenset[str] | None:
    """What the level needs and some CPU here has not; None where that is not to be known."""
    flags = [fact.split() for fact in facts() if fact.startswith("flags")]
    if level not in LEVELS or not flags:
        return None
    return frozenset(flag for flag in LEVELS[level] for have in flags if flag not in have)


def target_of(compiler: tuple[str, ...], option: str) -> str:
    """What `-march=native` means here in the compiler's own words; empty if it does not say.

    Asked beside /proc/cpuinfo, which a container may hide and an old kernel leaves half empty.
    """
    words = [*compiler, option, "-###", "-c", "-x", "c++", "/dev/null"]
    said = subprocess.run(words, capture_output=True, text=True, check=False).stderr
    # g++ hands its options to cc1plus, clang++ names a CPU and its features.
    parts = re.findall(r'"?(-m[^\s"]+|-target-(?:cpu|feature)"? "?[^\s"]+)', said)
    return " ".join(sorted({part for part in parts if not part.endswith("=native'")}))
