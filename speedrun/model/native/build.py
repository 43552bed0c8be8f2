"""Builds the C++ kernels: by which compiler, for which CPU, on whose threads, and kept where.

Two files without dependencies, so a compiler call of a few seconds is the whole build, kept under
$SPEEDRUN_HOME by a name made of everything that shaped it.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from speedrun.disk import flush

HERE = Path(__file__).parent
SOURCES = (HERE / "attention.cpp", HERE / "fused.cpp")
HEADERS = (HERE / "vec.h", HERE / "parallel.h")
FLAGS = (
    "-O3", "-std=c++17", "-fno-math-errno", "-ffp-contract=fast", "-pthread", "-shared", "-fPIC",
)  # fmt: skip
# 0: never build or load; the name of a CPU for the compiler's -march, such as x86-64-v3: for that
# one instead of the one that is here.
SWITCH = "SPEEDRUN_NATIVE"


@dataclass(frozen=True)
class Build:
    """What a build depends on besides the sources."""

    compiler: tuple[str, ...]  # the words of its command
    cpu: str = "native"
    openmp: bool = True

    def version(self) -> str:
        return _version(self.compiler)

    def command(self, library: Path) -> list[str]:
        # Compilers for ARM know the machine in front of them by -mcpu alone.
        x86 = platform.machine() in ("x86_64", "AMD64")
        option = "-mcpu=native" if self.cpu == "native" and not x86 else f"-march={self.cpu}"
        threads = ["-fopenmp"] if self.openmp else []
        return [*self.compiler, *FLAGS, option, *threads, *map(str, SOURCES), "-o", str(library)]

    def run(self, library: Path) -> str:
        """The library in its place, whole or not at all; what the compiler says if it fails."""
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            fresh = Path(folder) / library.name
            words = self.command(fresh)
            built = subprocess.run(words, capture_output=True, text=True, check=False)
            if built.returncode != 0:
                return built.stderr.strip() or f"exit code {built.returncode}"
            flush(fresh)
            size = fresh.stat().st_size
            fresh.replace(library)
            _size_file(library).write_text(f"{size}\n")
        return ""

    def name(self) -> str:
        texts = [path.read_text() for path in (*SOURCES, *HEADERS)]
        here = _processor() if self.cpu == "native" else ""
        parts = (*texts, self.version(), " ".join(self.command(Path())), here)
        return f"kernels-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"


def chosen() -> tuple[Build, ...] | str:
    """The builds that this environment asks for, the best first; or why there are none."""
    cpu = os.environ.get(SWITCH) or "native"
    if cpu == "0":
        return f"{SWITCH}=0 is set"
    named = os.environ.get("CXX")
    for words in [shlex.split(named)] if named else [["g++"], ["clang++"]]:
        if words and shutil.which(words[0]):
            build = Build(tuple(words), "native" if cpu == "1" else cpu)
            return build, replace(build, openmp=False)  # Apple's compiler has no OpenMP
    return f"no C++ compiler ({named or 'g++ or clang++'}) is found"


def build_or_find(builds: Sequence[Build]) -> tuple[Build, ctypes.CDLL] | str:
    """The first of the builds that the cache has, else the first to succeed; or why none does."""
    try:
        return _build_or_find(builds)
    except OSError as error:  # a full disk, a compiler that is none
        return f"the kernels cannot be built: {error}"


def _build_or_find(builds: Sequence[Build]) -> tuple[Build, ctypes.CDLL] | str:
    libraries = {build: cache_folder(build.name()) / build.name() for build in builds}
    if found := _cached(libraries):
        return found
    with _alone(libraries[builds[0]].parent):
        if found := _cached(libraries):  # built by another process meanwhile
            return found
        said = ""
        for build, library in libraries.items():
            if not (said := build.run(library)):
                try:
                    return build, ctypes.CDLL(str(library))
                except OSError as error:
                    said = f"the library does not load: {error}"
    names = ", ".join(source.name for source in SOURCES)
    return f"{shlex.join(builds[0].compiler)} cannot build {names}: {said[:200]}"


def _cached(libraries: Mapping[Build, Path]) -> tuple[Build, ctypes.CDLL] | None:
    for build, library in libraries.items():
        if _whole(library):
            with suppress(OSError):  # of another machine: built again
                return build, ctypes.CDLL(str(library))
    return None


def _size_file(library: Path) -> Path:
    return library.with_suffix(".size")


def _whole(library: Path) -> bool:
    """One that a full disk or a crash has cut short would not fail to load: it would kill us."""
    try:
        return library.stat().st_size == int(_size_file(library).read_text())
    except (OSError, ValueError):
        return False


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Of the ranks of a host that start together, one builds and the others wait for it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # without locks each builds its own, and the last rename wins
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def cache_folder(name: str) -> Path:
    """The cache, or a folder of this process's own where that cannot be written."""
    home = Path(os.environ.get("SPEEDRUN_HOME") or "~/.cache/speedrun")
    try:
        folder = home.expanduser() / "native"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # read-only, or no home at all
        return Path(tempfile.mkdtemp(prefix="speedrun-"))
    if _whole(folder / name) or os.access(folder, os.W_OK):
        return folder
    return Path(tempfile.mkdtemp(prefix="speedrun-"))


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    words = [*compiler, "--version"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def _processor() -> str:
    """What -march=native depends on, so that a home folder shared by machines stays safe."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))})
    )
