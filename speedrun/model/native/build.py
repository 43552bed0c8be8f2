"""Builds the C++ kernels: with which compiler, for which CPU, with which threads.

A few files without dependencies, compiled side by side: 10 s of one core. find.py decides whether
anything has to be built at all, and where it is kept.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from speedrun.files import flush, sha256_of
from speedrun.model.native import cpu

HERE = Path(__file__).parent
SOURCES = tuple(sorted(HERE.glob("*.cpp")))
FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-ffp-contract=fast", "-pthread", "-fPIC")
# What g++ and its linker say of a disk without room; the last is said of a limit on files.
NO_ROOM = re.compile(
    "No space left on device|Disk quota exceeded|File too large|File size limit exceeded"
)


@dataclass(frozen=True)
class Build:
    """The settings of a build."""

    compiler: tuple[str, ...]  # the words of its command
    cpu: str = "native"
    openmp: bool = True
    # Options for every file, and for the last step in place of those for threads; for
    # tools/packaging/kernels.py.
    extra: tuple[str, ...] = ()
    link: tuple[str, ...] | None = None

    def command(self) -> list[str]:
        """The compiler with its options, which files follow."""
        return [*self.compiler, *FLAGS, self._target(), *self.extra, *self._threads()]

    def run(self, library: Path) -> str:
        """Build `library`, complete or not at all; returns the compiler's complaint, if any.

        An OSError says that there is no room for it, or no right to write it.
        """
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            fresh = Path(folder) / library.name
            objects = [f"{folder}/{source.stem}.o" for source in SOURCES]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                compile_one = functools.partial(self._compile, self._apart())
                said = list(pool.map(compile_one, map(str, SOURCES), objects))
            complaint = next(filter(None, said), "") or self._join(objects, fresh)
            if NO_ROOM.search(complaint):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(library.parent))
            if complaint:
                return complaint
            flush(fresh)
            digest = sha256_of(fresh)
            fresh.replace(library)
            library.with_suffix(".sha256").write_text(f"{digest}\n")
        return ""

    def name(self) -> str:
        """A file name that changes with everything the library depends on.

        An OSError says that this CPU cannot be told from another, for which a library of the same
        name may have been built.
        """
        parts = [sources_sha256(), version_of(self.compiler), shlex.join(self.command())]
        if self.cpu == "native":
            here = self._here()
            if not here:
                raise OSError(errno.ENOENT, "no telling which CPU this is", str(cpu.CPUINFO))
            parts.append(here)
        return f"kernels-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"

    def _here(self) -> str:
        """This CPU, in the words of the system and of the compiler; empty if both are silent."""
        words = [*sorted(cpu.facts()), cpu.target_of(self.compiler, self._target())]
        return "\n".join(filter(None, words))

    def _apart(self) -> str:
        """An option without a meaning, another one for each CPU that `native` may stand for.

        ccache and its like know a call by its words, and machines may share what it keeps.
        """
        here = self._here() if self.cpu == "native" else self.cpu
        known = hashlib.sha256(here.encode()).hexdigest() if here else os.urandom(16).hex()
        return f"-DSPEEDRUN_CPU={known[:16]}"

    def _target(self) -> str:
        # On ARM only -mcpu accepts "native".
        x86 = platform.machine() in ("x86_64", "AMD64")
        return "-mcpu=native" if self.cpu == "native" and not x86 else f"-march={self.cpu}"

    def _threads(self) -> tuple[str, ...]:
        return ("-fopenmp",) if self.openmp else ()

    def _compile(self, apart: str, source: str, output: str) -> str:
        return _call([*self.command(), apart, "-c", source, "-o", output])

    def _join(self, objects: list[str], library: Path) -> str:
        options = self._threads() if self.link is None else self.link
        said = _call([*self.compiler, *FLAGS, "-shared", *objects, *options, "-o", str(library)])
        return said or ("" if library.is_file() else "it says nothing and writes no library")


def _call(words: list[str]) -> str:
    """What a compiler complains about; empty if it succeeds."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode < 0:  # by a limit on files, or for want of memory
        return signal.strsignal(-done.returncode) or f"signal {-done.returncode}"
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit {done.returncode}"


def sources_sha256() -> str:
    """A hash of every file that the kernels are made of, names and contents."""
    digest = hashlib.sha256()
    for path in sorted((*HERE.glob("*.cpp"), *HERE.glob("*.h"))):
        digest.update(f"{path.name}\0{sha256_of(path)}\0".encode())
    return digest.hexdigest()


def chosen(target: str) -> tuple[Build, ...] | str:
    """The builds to try for a CPU in this environment, the best first; or why there are none."""
    named = os.environ.get("CXX", "").strip()
    try:
        commands = [shlex.split(named)] if named else [["g++"], ["clang++"]]
    except ValueError as error:
        return f"CXX is no command ({error}: {named}); set it to a C++ compiler, or unset it"
    for words in commands:
        if shutil.which(words[0]):
            build = Build(tuple(words), target)
            return build, replace(build, openmp=False)  # Apple's compiler has no OpenMP
    advice = "unset CXX, or name one that is installed" if named else "install g++"
    return f"no C++ compiler ({named or 'g++ or clang++'}) is found; {advice}"


def compiler_here() -> str:
    """Where the compiler is that would build, or why there is none."""
    builds = chosen("native")
    return builds if isinstance(builds, str) else str(shutil.which(builds[0].compiler[0]))


@functools.cache
def version_of(compiler: tuple[str, ...]) -> str:
    words = [*compiler, "--version"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout
