"""Signals and the time limit, which the loop asks about between two steps.

SIGINT and SIGTERM ask for a checkpoint and an end, SIGUSR1 for a checkpoint only. An update is
never cut in half: the first signal asks, a second SIGINT insists. A time limit counts from the
start of the process, as the limits of schedulers do.
"""

from __future__ import annotations

import math
import signal
import time
from types import FrameType
from typing import NamedTuple, Self

from speedrun.train.clock import Clock

TIME_LIMIT_CODE = 124  # as `timeout` exits
STOPS = (TIME_LIMIT_CODE, 128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes of asked stops


class Pending(NamedTuple):
    """What has been asked for since the last step; ranks share it in `health.agree`."""

    interrupt: bool = False
    terminate: bool = False
    out_of_time: bool = False
    save: bool = False

    def also(self, other: Pending) -> Pending:
        """What was asked for in either."""
        return Pending(*(one or two for one, two in zip(self, other, strict=True)))

    @property
    def exit_code(self) -> int | None:
        """The code of a stop, or None for no stop."""
        if self.terminate:
            return 128 + signal.SIGTERM
        if self.interrupt:
            return 128 + signal.SIGINT
        return TIME_LIMIT_CODE if self.out_of_time else None


class Controls:
    """While entered, catches signals and keeps them for the loop."""

    def __init__(self, time_limit: float | None = None) -> None:
        limit = math.inf if time_limit is None else time_limit
        self._deadline = time.monotonic() + limit - Clock.wall()
        self._stop: signal.Signals | None = None
        self._save = False

    def pending(self) -> Pending:
        late = time.monotonic() >= self._deadline
        save, self._save = self._save, False
        return Pending(self._stop == signal.SIGINT, self._stop == signal.SIGTERM, late, save)

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        self._before = {number: signal.signal(number, self._ask) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._save = True
        elif number == signal.SIGINT and self._stop is not None:
            raise KeyboardInterrupt
        else:
            self._stop = signal.Signals(number)
