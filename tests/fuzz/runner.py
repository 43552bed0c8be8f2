"""Runs cases in forked processes until the time is over; names, keeps and repeats what is wrong.

A case is known by target, seed and number, from which its input follows. A process takes a batch of
them, so a crash by signal ends one batch and names the case it came in; a case that takes too long
is ended with the stack that it hung in; memory is bounded, so that a config that asks for too much
fails in the case and not in the machine.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import selectors
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

from tests.fuzz.outcome import Outcome

PATIENCE = 60.0  # seconds for one case; machines are busy
MEMORY = 4 << 30  # bytes that a process may take beyond what it begins with
SHOWN = 4000  # characters of a fault


class Session(Protocol):
    """What a target needs while a batch runs, such as a server."""

    def make(self, rng: Random, folder: Path) -> Any:
        """An input, its files in an empty folder."""

    def judge(self, made: Any, folder: Path, /) -> Outcome: ...


class Target(Protocol):
    """A kind of input. `share` is its part of the time, `batch` the cases of one process."""

    @property
    def name(self) -> str: ...
    @property
    def share(self) -> float: ...
    @property
    def batch(self) -> int: ...
    def session(self, scratch: Path) -> AbstractContextManager[Session]: ...


@dataclass
class Tally:
    inputs: int = 0
    results: int = 0
    sentences: int = 0
    faults: int = 0
    seconds: float = 0.0  # of a core
    next: int = 0  # number of the next case

    def add(self, kind: str) -> None:
        self.inputs += 1
        self.results += kind == "result"
        self.sentences += kind == "sentence"
        self.faults += kind == "fault"


@dataclass
class _Job:
    target: Target
    pid: int
    pipe: int
    scratch: Path
    case: int = -1  # under way
    text: bytes = b""


@dataclass
class Runner:
    """`keep` is where inputs that are wrong stay."""

    seed: int
    keep: Path
    scratch: Path
    workers: int = 2
    tallies: dict[str, Tally] = field(default_factory=dict)
    faults: dict[str, list[str]] = field(default_factory=dict)  # cases by what is wrong

    def fuzz(self, targets: list[Target], seconds: float) -> None:
        """Batches of all targets, by their shares of the time."""
        end = time.monotonic() + seconds
        self.tallies = {target.name: Tally() for target in targets}
        jobs: list[_Job] = []
        while jobs or time.monotonic() < end:
            while len(jobs) < self.workers and time.monotonic() < end:
                target = min(targets, key=lambda one: self._spent(one, jobs) / one.share)
                tally = self.tallies[target.name]
                jobs.append(self._start(target, range(tally.next, tally.next + target.batch), end))
                tally.next += target.batch
            jobs = self._wait(jobs)

    def _spent(self, target: Target, jobs: list[_Job]) -> float:
        """What is under way is taken to last a second."""
        return self.tallies[target.name].seconds + sum(job.target is target for job in jobs)

    def repeat(self, target: Target, case: int) -> None:
        """One case by itself, for whoever mends it."""
        self.tallies.setdefault(target.name, Tally())
        jobs = [self._start(target, range(case, case + 1), float("inf"))]
        while jobs:
            jobs = self._wait(jobs)

    def _start(self, target: Target, cases: range, end: float) -> _Job:
        reading, writing = os.pipe()
        scratch = self.scratch / f"{target.name}-{cases.start}"
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            code = 1
            try:
                _work(target, self.seed, cases, scratch, self.keep, writing, end)
                code = 0
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)  # what threads and servers of a case are doing is over with it
        os.close(writing)
        os.set_blocking(reading, False)
        return _Job(target, pid, reading, scratch)

    def _wait(self, jobs: list[_Job]) -> list[_Job]:
        """Take what the processes say; gives those that go on."""
        going = []
        with selectors.DefaultSelector() as selector:
            for job in jobs:
                selector.register(job.pipe, selectors.EVENT_READ, job)
            ready = {key.fd for key, _ in selector.select()}
        for job in jobs:
            if job.pipe not in ready or self._read(job):
                going.append(job)
            else:
                self._ended(job)
        return going

    def _read(self, job: _Job) -> bool:
        """Lines of a process; False at its end."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(job.pipe, 1 << 20)
            if not data:
                return False
        *lines, job.text = (job.text + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            job.case = said["case"]
            if "kind" in said:
                self.tallies[job.target.name].add(said["kind"])
                if said["kind"] == "fault":
                    self._fault(job.target, job.case, said["about"])
                job.case = -1
        return True

    def _ended(self, job: _Job) -> None:
        os.close(job.pipe)
        _, status, used = os.wait4(job.pid, 0)
        tally = self.tallies[job.target.name]
        tally.seconds += used.ru_utime + used.ru_stime
        code = os.waitstatus_to_exitcode(status)
        if code != 0:
            heard = job.scratch / "stderr"
            said = heard.read_text(errors="replace") if heard.exists() else ""
            # A dump of every thread's stack may be long, and its first line says what it is.
            hung = "Timeout (" in said
            how = f"hung for {PATIENCE:g} s" if hung else f"process ended with {code}"
            said = said[-SHOWN:]
            if code < 0:
                how = f"killed by {signal.Signals(-code).name}"
            tally.add("fault")
            if job.case >= 0:
                _save(job.target, self.seed, job.case, self.scratch, self.keep)
            self._fault(job.target, job.case, f"{how} {_deepest(said)}\n{said}")
        shutil.rmtree(job.scratch, ignore_errors=True)

    def _fault(self, target: Target, case: int, about: str) -> None:
        first = about.partition("\n")[0]
        known = self.faults.setdefault(f"{target.name}: {first}", [])
        # What goes wrong between cases, such as at the end of a server, has no number.
        known.append(f"{target.name}:{case}" if case >= 0 else target.name)
        if len(known) == 1:
            print(f"\nFAULT in {target.name}: {about[:SHOWN]}")
            print(f"input:     {_kept(self.keep, target, self.seed, case)}")
            print(f"reproduce: {command(self.seed, known[0])}", flush=True)


def command(seed: int, case: str) -> str:
    return f'make fuzz SEED={seed} ARGS="{case}"'


def _deepest(said: str) -> str:
    """Of a dumped stack, its innermost line of ours."""
    ours = [line for line in said.splitlines() if "/speedrun/" in line and "line" in line]
    return ours[0].strip().rpartition("/speedrun/")[2] if ours else ""


def _kept(keep: Path, target: Target, seed: int, case: int) -> Path:
    return keep / f"{target.name}-{seed}-{case}"


def _rng(target: Target, seed: int, case: int) -> Random:
    return Random(f"{target.name} {seed} {case}")


def _work(
    target: Target, seed: int, cases: range, scratch: Path, keep: Path, pipe: int, end: float
) -> None:
    """A batch, in a process of its own that says before and after each case what it does."""

    def say(**values: Any) -> None:
        os.write(pipe, json.dumps(values).encode() + b"\n")

    scratch.mkdir(parents=True)
    with target.session(scratch) as session, _bounded():
        for case in cases:
            if time.monotonic() > end:
                break
            folder = scratch / "case"
            folder.mkdir()
            made = session.make(_rng(target, seed, case), folder)
            say(case=case)
            faulthandler.dump_traceback_later(PATIENCE, exit=True, file=2)
            outcome = session.judge(made, folder)
            faulthandler.cancel_dump_traceback_later()
            os.chdir(scratch)
            if outcome.kind == "fault":
                _save(target, seed, case, scratch, keep, session, outcome.about)
            say(case=case, kind=outcome.kind, about=outcome.about[:SHOWN])
            shutil.rmtree(folder)


@contextmanager
def _bounded() -> Iterator[None]:
    faulthandler.enable(file=2)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    if pages:
        size = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    yield


def _save(
    target: Target, seed: int, case: int, scratch: Path, keep: Path,
    session: Session | None = None, about: str = "",
) -> None:  # fmt: skip
    """The input once more, where it stays."""
    place = _kept(keep, target, seed, case)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    if session is not None:
        made = session.make(_rng(target, seed, case), place)
        (place / "fault.txt").write_text(f"{about}\n\n{made!a}\n", errors="backslashreplace")
        return
    pid = os.fork()  # what a session sets up is not for this process
    if pid == 0:
        try:
            (scratch / "saving").mkdir()
            with target.session(scratch / "saving") as opened:
                _save(target, seed, case, scratch, keep, opened, "see the output of the run")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    shutil.rmtree(scratch / "saving", ignore_errors=True)
