"""The C++ kernels under the compiler's sanitizers, by themselves and as Python calls them.

A program takes numbers of cases and answers each with a line; where it ends instead, it has said
why. `kernels` is one in C++ (kernels/kernels.cpp), `operators` one in Python (operators.py).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from speedrun.files import cache_home
from speedrun.model.native.build import HERE, SOURCES
from tests.fuzz.outcome import Outcome
from tests.fuzz.world import World

CASES = Path(__file__).parent / "kernels"
MEMORY = "address,undefined"
KEPT = cache_home() / "fuzz"  # before a world has another home: builds outlast it


class CannotBuildError(Exception):
    """Why there is no such program here."""


@dataclass(frozen=True)
class Program:
    """What runs cases, and in which environment."""

    words: Sequence[str | Path]
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self, said: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True,
            env={**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1", **self.environment},
            cwd=Path(__file__).parents[2],
        )  # fmt: skip

    def complaint(self, numbers: Sequence[int], patience: float) -> str:
        """What was wrong in these cases; empty: nothing."""
        program = self.start(subprocess.PIPE)
        out, err = program.communicate("".join(f"{n}\n" for n in numbers), timeout=patience)
        done = len(out.splitlines())
        if program.returncode == 0 and done == len(numbers):
            return ""
        return f"exit {program.returncode} in case {[*numbers, -1][done]}\n{err[:5000]}"


def in_cpp(
    kind: str = MEMORY, cpu: str = "native", level: str = "-O1", kept: Path = KEPT
) -> Program:
    """With sanitizers of that kind: address,undefined or thread."""
    return Program([_built(kept, kind, cpu, level, [CASES / "kernels.cpp"])])


def in_python(kept: Path = KEPT) -> Program:
    """The operators, on kernels that were built as a library."""
    library = _built(kept, MEMORY, "native", "-O0", SOURCES, "-shared", "-fPIC")
    found = [
        _said("g++", f"-print-file-name={name}.so").strip() for name in ("libasan", "libubsan")
    ]
    environment = {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0"}  # Python's own
    words: list[str | Path] = [sys.executable, "-m", "tests.fuzz.operators", library]
    return Program(words, {**environment, "OMP_NUM_THREADS": "1"})


def _built(
    kept: Path, kind: str, cpu: str, level: str, sources: Sequence[Path], *more: str
) -> Path:
    """A program or a library, kept while the sources stay as they are."""
    if shutil.which("g++") is None:
        raise CannotBuildError("g++ is not installed")
    flags = [level, "-g1", "-std=c++17", "-ffp-contract=fast", "-pthread", f"-march={cpu}",
             f"-fsanitize={kind}", "-fno-sanitize-recover=all", f"-I{HERE}", *more]  # fmt: skip
    digest = hashlib.sha256(" ".join(flags).encode())
    for path in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h"), *CASES.iterdir()]):
        digest.update(path.read_bytes())
    made = kept / f"kernels-{digest.hexdigest()[:16]}"
    if made.exists():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second finds it built
        if not made.exists():
            _build(flags, kind, sources, made)
    return made


def _build(flags: Sequence[str], kind: str, sources: Sequence[Path], made: Path) -> None:
    fresh, empty = (made.with_suffix(f".{os.getpid()}{end}") for end in ("", ".cpp"))
    try:
        empty.write_text("int main() { return 0; }\n")  # are there such sanitizers at all?
        if complaint := _said("g++", *flags, str(empty), "-o", str(fresh)):
            raise CannotBuildError(f"there is no -fsanitize={kind}: {complaint[:300]}")
        complaint = _said("g++", *flags, *map(str, sources), "-o", str(fresh))
        assert not complaint, complaint
        fresh.rename(made)
    finally:
        empty.unlink(missing_ok=True)
        fresh.unlink(missing_ok=True)


def _said(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr + (f"exit {done.returncode}" if done.returncode else "")


@dataclass(frozen=True)
class Kernels:
    """Each process has a program of its own, which runs as long as nothing is wrong."""

    name: str
    program: Callable[[], Program]  # built when first needed, which takes half a minute
    batch: int
    share: float = 1.0

    @contextmanager
    def session(self, scratch: Path) -> Iterator[Cases]:
        # Started again by a shell whenever it has ended: from here on memory is bounded, which the
        # address sanitizer cannot do with.
        built = self.program()
        forever = ["sh", "-c", 'until "$@"; do echo ended; done', "sh", *built.words]
        with (scratch / "said").open("a") as said:
            running = Program(forever, built.environment).start(said.fileno())
        yield Cases(running, scratch / "said")
        running.communicate()


@dataclass(frozen=True)
class Cases:
    running: subprocess.Popen[str]
    said: Path

    def make(self, rng: Random, folder: Path) -> int:
        number = rng.getrandbits(62)
        (folder / "case").write_text(f"{number}\n")
        return number

    def judge(self, made: int, _: Path) -> Outcome:
        asked, answers = self.running.stdin, self.running.stdout
        assert asked is not None
        assert answers is not None
        asked.write(f"{made}\n")
        asked.flush()
        if answers.readline() not in ("ended\n", ""):
            return Outcome("result")
        lines = [line for line in self.said.read_text().splitlines() if line.strip()]
        os.truncate(self.said, 0)
        told = [line.split("==")[-1] for line in lines if "error:" in line.lower()] or lines
        what = re.sub(r"0x[0-9a-f]+", "...", told[0] if told else "it ended")  # the same each time
        return Outcome("fault", "\n".join([what, *lines]))


def kernels(_: World) -> list[Kernels]:
    """None where there is no compiler, which is said."""
    if shutil.which("g++") is None:
        print("the kernels are not fuzzed: g++ is not installed", flush=True)
        return []
    return [Kernels("kernels", in_cpp, 400), Kernels("operators", in_python, 100)]
