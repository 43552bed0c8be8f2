"""Finds the kernels: prebuilt ones that fit this CPU, else a build for it, kept from then on.

A platform wheel brings kernels prebuilt (prebuilt.py). They are as fast as a build for this very
CPU, so nothing is built where they fit. What is built is kept under $SPEEDRUN_HOME, named by a hash
of everything that it depends on.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from speedrun.files import cache_home, has_sha256
from speedrun.locks import held
from speedrun.model.native import cpu, prebuilt
from speedrun.model.native.build import Build, chosen, version_of
from speedrun.model.native.prebuilt import Found

# 0: use no kernels; native: build for this CPU, whatever is prebuilt; a CPU name that the
# compiler's -march knows, such as x86-64-v3: for that CPU instead, prebuilt or built.
SWITCH = "SPEEDRUN_NATIVE"
OPENMP = re.compile("openmp|gomp|iomp|libomp|omp[.]h|kmpc", re.IGNORECASE)


def find_kernels() -> Found | str:
    """The kernels for this machine, or why there are none and what would change that."""
    asked = os.environ.get(SWITCH) or "1"
    if asked == "0":
        return f"{SWITCH}=0 is set"
    if missing := cpu.lacking(asked):
        flags = ", ".join(sorted(missing))
        return f"{SWITCH}={asked} is set and this CPU lacks {flags}; unset it"
    ready = prebuilt.find_prebuilt(asked) if asked != "native" else f"{SWITCH}=native is set"
    if isinstance(ready, Found):
        return ready
    builds = chosen("native" if asked == "1" else asked)
    made = builds if isinstance(builds, str) else build_or_find(builds)
    return f"{made}; {ready}" if isinstance(made, str) else replace(made, why=ready)


def build_or_find(builds: Sequence[Build]) -> Found | str:
    """The first build that succeeds, now or when it was kept; or why none does."""
    try:
        return _first(builds)
    except OSError as error:  # no room anywhere, or a compiler that cannot be run
        return (
            f"the kernels cannot be built: {error}; set SPEEDRUN_HOME or TMPDIR to a folder with "
            "room for them, from which programs may be run"
        )


def _first(builds: Sequence[Build]) -> Found | str:
    """A build whose OpenMP fails where the next one succeeds is marked and not tried again."""
    said, refused = "none is left to try", list[Path]()
    for build in builds:
        note, mark = "", None
        try:
            kept = cache_folder() / build.name()
            mark = kept.with_suffix(".refused")
            if mark.exists():
                continue
            library, said = _kept(build, kept)
        except OSError as problem:  # a folder that cannot be written: this process alone has it
            with tempfile.TemporaryDirectory(prefix="speedrun-") as folder:
                library, said = _built(build, Path(folder) / "kernels.so")
            note = (
                f"built again at each start because it cannot be kept ({problem}): set "
                "SPEEDRUN_HOME to a folder that can be written"
            )
        if library is not None:
            with suppress(OSError):
                for other in refused:
                    other.touch()
            compiler, _, _ = version_of(build.compiler).partition("\n")
            return Found(library, f"built by {compiler}", "it was asked for", note)
        if mark is not None and OPENMP.search(said):
            refused.append(mark)
    advice = "; unset CXX, or set it to a compiler that works" if os.environ.get("CXX") else ""
    return f"{shlex.join(builds[0].compiler)} cannot build the kernels: {said[:200]}{advice}"


def _kept(build: Build, library: Path) -> tuple[ctypes.CDLL | None, str]:
    """The library, built unless it is there and whole; or the complaint about OpenMP or sources."""
    if found := load_whole(library):
        return found, ""
    # Of the ranks that start together one builds and the others wait.
    with held(library.with_suffix(".lock"), wait=True):
        if found := load_whole(library):  # built by another process meanwhile
            return found, ""
        return _built(build, library)


def _built(build: Build, library: Path) -> tuple[ctypes.CDLL | None, str]:
    if said := build.run(library):
        return None, said
    try:
        return ctypes.CDLL(str(library)), ""
    except OSError as error:  # OpenMP's routines are missing; or the disk is not to run things from
        if not OPENMP.search(str(error)):
            raise
        return None, f"the library does not load: {error}"


def load_whole(library: Path) -> ctypes.CDLL | None:
    """The library if its bytes are those that were built: to load a damaged one is a crash."""
    with suppress(OSError):  # not there, or not for this system: build again
        if has_sha256(library, library.with_suffix(".sha256").read_text().strip()):
            return ctypes.CDLL(str(library))
    return None


def cache_folder() -> Path:
    """Where libraries are kept; an OSError where that is not to be had."""
    try:
        folder = cache_home() / "native"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True)
    return folder
