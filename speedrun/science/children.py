"""The child processes of a race: waited for together and, when asked, stopped together.

SIGINT and SIGTERM are handed to the children as SIGTERM, upon which each saves a checkpoint and
ends. Not as SIGINT: a terminal sends its Ctrl-C to the children as well, and a second one would cut
them off. Only a second Ctrl-C does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from tempfile import TemporaryFile
from types import FrameType
from typing import Self

from speedrun.processes import OF_A_COMMAND, same_code

ERROR = "speedrun: error: "  # how a command begins the sentence that it ends with
PAUSE = 0.05  # seconds between two looks at the children


class Child:
    """A `speedrun` command in a process of its own. A file, unlike a pipe, takes all it says."""

    def __init__(self, words: Sequence[str]) -> None:
        # Open for as long as the child is known.
        self._output, self._errors = TemporaryFile("w+"), TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "speedrun", *words],
            stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._errors,
            env={**os.environ, **same_code(), OF_A_COMMAND: "1"},
        )  # fmt: skip

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def last_words(self) -> str:
        """Its first error, since of several ranks the last word is that another one failed."""
        for file in (self._errors, self._output):
            file.seek(0)
            if lines := file.read().strip().splitlines():
                return next((line for line in lines if line.startswith(ERROR)), lines[-1])
        return "it said nothing"


class Children:
    """Children by number. While entered, a signal to stop goes to all; none outlives the exit."""

    def __init__(self) -> None:
        self.running: dict[int, Child] = {}
        self.asked: signal.Signals | None = None  # to stop
        self.late = False  # the deadline has passed

    def start(self, number: int, words: Sequence[str]) -> None:
        self.running[number] = Child(words)
        if self.asked:  # while it was being started
            self.running[number].terminate()

    def wait(self, deadline: float | None = None) -> tuple[int, Child]:
        """The next one that ends; at the deadline (of `time.monotonic`) all are asked to."""
        while True:
            for number, child in self.running.items():
                if child.poll() is not None:
                    return number, self.running.pop(number)
            if deadline is not None and not self.late and time.monotonic() >= deadline:
                self.late = True
                for child in self.running.values():
                    child.terminate()
            time.sleep(PAUSE)

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._stop) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for child in self.running.values():
            child.kill() if kind is KeyboardInterrupt else child.terminate()
        while self.running:
            self.wait()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _: FrameType | None) -> None:
        if number == self.asked == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number)
        for child in self.running.values():
            child.terminate()
