"""Builds the C++ kernels: with which compiler, for which CPU, with which threads, cached where.

A few files without dependencies, compiled side by side: 10 s of one core. The library is cached
under $SPEEDRUN_HOME, named by a hash of everything that it depends on.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from speedrun.files import cache_home, flush

HERE = Path(__file__).parent
NAMES = ("attention", "decode", "fused", "linear", "loss", "matmul", "orthogonalize")
SOURCES = tuple(HERE / f"{name}.cpp" for name in NAMES)
HEADERS = tuple(HERE / f"{name}.h" for name in ("matmul", "norm", "parallel", "vec"))
FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-ffp-contract=fast", "-pthread", "-fPIC")
# 0: use no kernels; a CPU name that the compiler's -march knows, such as x86-64-v3: build for that
# CPU instead of this machine's.
SWITCH = "SPEEDRUN_NATIVE"


@dataclass(frozen=True)
class Build:
    """The settings of a build."""

    compiler: tuple[str, ...]  # the words of its command
    cpu: str = "native"
    openmp: bool = True

    def command(self) -> list[str]:
        """The compiler with its options, which files follow."""
        # On ARM only -mcpu accepts "native".
        x86 = platform.machine() in ("x86_64", "AMD64")
        option = "-mcpu=native" if self.cpu == "native" and not x86 else f"-march={self.cpu}"
        threads = ["-fopenmp"] if self.openmp else []
        return [*self.compiler, *FLAGS, option, *threads]

    def run(self, library: Path) -> str:
        """Build `library`, complete or not at all; returns the compiler's complaint, if any."""
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            fresh = Path(folder) / library.name
            objects = [f"{folder}/{source.stem}.o" for source in SOURCES]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                said = pool.map(self._call, (["-c", str(source)] for source in SOURCES), objects)
            if complaint := "".join(said) or self._call(["-shared", *objects], str(fresh)):
                return complaint
            flush(fresh)
            size = fresh.stat().st_size
            fresh.replace(library)
            library.with_suffix(".size").write_text(f"{size}\n")
        return ""

    def _call(self, words: list[str], output: str) -> str:
        call = [*self.command(), *words, "-o", output]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else done.stderr.strip() or f"exit {done.returncode}"

    def name(self) -> str:
        texts = [path.read_text() for path in (*SOURCES, *HEADERS)]
        here = _processor() if self.cpu == "native" else ""
        parts = (*texts, version_of(self.compiler), " ".join(self.command()), here)
        return f"kernels-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"


def chosen() -> tuple[Build, ...] | str:
    """The builds to try in this environment, the best first; or why there are none."""
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
    """The first build that succeeds, now or when it was cached; or why none does.

    A build that fails where the next one succeeds is marked as refused and not tried again.
    """
    said, refused = "none is left to try", list[Path]()
    for build in builds:
        library = cache_folder(build.name()) / build.name()
        if library.with_suffix(".refused").exists():
            continue
        if found := _cached(library):
            return build, found
        with _locked(library.parent):
            if found := _cached(library):  # built by another process meanwhile
                return build, found
            if not (said := build.run(library)):
                try:
                    found = ctypes.CDLL(str(library))
                except OSError as error:
                    said = f"the library does not load: {error}"
                else:
                    for other in refused:
                        other.touch()
                    return build, found
            refused.append(library.with_suffix(".refused"))
    names = ", ".join(source.name for source in SOURCES)
    return f"{shlex.join(builds[0].compiler)} cannot build {names}: {said[:200]}"


def _cached(library: Path) -> ctypes.CDLL | None:
    if _complete(library):
        with suppress(OSError):  # built on another machine: build again
            return ctypes.CDLL(str(library))
    return None


def _complete(library: Path) -> bool:
    """Whether the file has its full size: loading a truncated library kills the process."""
    try:
        return library.stat().st_size == int(library.with_suffix(".size").read_text())
    except (OSError, ValueError):
        return False


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A lock: of the ranks that start together on a host, one builds and the others wait."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # no locks here: each builds, the last rename wins
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def cache_folder(name: str) -> Path:
    """The cache folder, or a temporary folder where that cannot be written."""
    with suppress(OSError, RuntimeError):  # read-only, or no home at all
        folder = cache_home() / "native"
        folder.mkdir(parents=True, exist_ok=True)
        if _complete(folder / name) or os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="speedrun-"))


@functools.cache
def version_of(compiler: tuple[str, ...]) -> str:
    words = [*compiler, "--version"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def _processor() -> str:
    """The CPU that -march=native builds for, in case machines share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    facts = {x for x in lines if x.startswith(("model name", "flags", "Features"))}
    return "\n".join(sorted(facts))
