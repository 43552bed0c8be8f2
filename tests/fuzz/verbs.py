"""A target whose inputs are commands and the files they read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz.outcome import Command, Outcome, Streams, judge

Make = Callable[[Random, Path], Command]


@dataclass(frozen=True)
class Commands:
    make: Make
    streams: Streams

    def judge(self, made: Command, folder: Path) -> Outcome:
        return judge(made, folder, self.streams)


@dataclass(frozen=True)
class Verbs:
    name: str
    share: float
    make: Make
    batch: int = 50

    @contextmanager
    def session(self, scratch: Path) -> Iterator[Commands]:
        yield Commands(self.make, Streams(scratch))
