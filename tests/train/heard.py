"""A display for tests that keeps what it is told, and can press Ctrl-C."""

from __future__ import annotations

import signal

from speedrun.train.display import PlainDisplay
from speedrun.train.log import StepView


class Heard(PlainDisplay):
    """Presses Ctrl-C at a step of the run, or after so many steps it was shown."""

    def __init__(self, at_step: int = -1, *, after: int = -1) -> None:
        self.lines: list[str] = []
        super().__init__(self.lines.append)
        self._at_step, self._after, self._shown = at_step, after, 0

    def step(self, view: StepView) -> None:
        super().step(view)
        self._shown += 1
        if view.step == self._at_step or self._shown == self._after:
            signal.raise_signal(signal.SIGINT)
