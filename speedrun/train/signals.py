"""Signals as wishes that the loop answers between two steps.

SIGINT and SIGTERM ask for a checkpoint and an end, SIGUSR1 for a checkpoint only. An update is
never cut in half: the first signal asks, a second SIGINT insists. A time limit counts from the
start of the process, as the limits of schedulers do.
"""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

from speedrun.train.clock import Clock

TIME_LIMIT_CODE = 124  # as `timeout` exits
STOPS = (TIME_LIMIT_CODE, 128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes of asked stops


class Controls:
    """What the outside has asked for; ranks share their wishes in `health.agree`."""

    def __init__(self, time_limit: float | None = None) -> None:
        self._deadline: float | None = None
        if time_limit is not None:
            self._deadline = time.monotonic() + time_limit - Clock.wall()
        self._stop: signal.Signals | None = None
        self._save = False

    def wishes(self) -> tuple[bool, bool, bool, bool]:
        """(interrupt, terminate, out of time, save)."""
        late = self._deadline is not None and time.monotonic() >= self._deadline
        save, self._save = self._save, False
        return self._stop == signal.SIGINT, self._stop == signal.SIGTERM, late, save

    def __enter__(self) -> Self:
        handlers = {
            signal.SIGINT: self._ask_stop,
            signal.SIGTERM: self._ask_stop,
            signal.SIGUSR1: self._ask_save,
        }
        self._before: dict[signal.Signals, Any] = {
            number: signal.signal(number, handler) for number, handler in handlers.items()
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask_stop(self, number: int, _: FrameType | None) -> None:
        if self._stop is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._stop = signal.Signals(number)

    def _ask_save(self, _number: int, _: FrameType | None) -> None:
        self._save = True


def exit_code(interrupted: bool, terminated: bool, late: bool) -> int | None:
    """The code of a stop, or None for no stop."""
    if terminated:
        return 128 + signal.SIGTERM
    if interrupted:
        return 128 + signal.SIGINT
    return TIME_LIMIT_CODE if late else None
