"""Two clocks: seconds spent training, and seconds since the process began.

The training clock follows the speedrun's rule: it runs during training steps and stands still
during validation, sampling and checkpoints, with the device synchronised at the borders. The wall
clock hides nothing, and every summary shows both.

Between the borders a GPU is not waited for: it notes by itself when it comes to a step's end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from speedrun.hardware import process_start

Mark = float | torch.cuda.Event


class Clock:
    """Training seconds so far; `paused()` stops it for what is not training."""

    def __init__(self, device: torch.device, seconds: float = 0.0) -> None:
        self._device = device
        self._before = seconds
        self._since: float | None = None

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def start(self) -> None:
        self._since = self._now()
        if self._device.type == "cuda":
            self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._begin.record()

    @property
    def seconds(self) -> float:
        """So far, with the work under way on the device done."""
        return self._before + (0.0 if self._since is None else self._now() - self._since)

    def mark(self) -> Mark:
        """The end of the work begun so far."""
        if self._device.type != "cuda":
            return self._now()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def at(self, mark: Mark) -> float:
        """Seconds when the device came to this mark of the present stretch; waits until it has."""
        assert self._since is not None
        if isinstance(mark, float):
            return self._before + mark - self._since
        mark.synchronize()
        milliseconds: float = self._begin.elapsed_time(mark)
        return self._before + milliseconds / 1000

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._before, self._since = self.seconds, None
        try:
            yield
        finally:
            self.start()

    @staticmethod
    def wall() -> float:
        return time.time() - process_start()
