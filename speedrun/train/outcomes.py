"""Steps that are under way, and what they came to, once that is known.

A CPU knows at once. Of a GPU the last step is not asked about, unless somebody has to wait for it
anyway: it is still at work on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from speedrun.config.schedule import Settings
from speedrun.train.health import Outcome, Report
from speedrun.train.progress import Progress

NONFINITE_STEPS = 3  # in a row, before the run goes back to a checkpoint


class Begun(NamedTuple):
    report: Report
    settings: Settings
    step: int
    batch: int
    waited: float  # seconds for data, by then


class UnderWay:
    """In the order in which they were begun; telling of one takes it into account in `progress`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._begun: deque[Begun] = deque()
        self.last_bad = (0, 0)  # step and batch that were not finite

    def __len__(self) -> int:
        return len(self._begun)

    def add(self, report: Report, settings: Settings, waited: float) -> None:
        """The step that `progress` has just counted."""
        place = self._progress.step, self._progress.batch - 1
        self._begun.append(Begun(report, settings, *place, waited))

    def told(self, *, everything: bool) -> Iterator[Outcome]:
        """What was not told yet, but for the last step, unless `everything` is asked for."""
        while len(self._begun) > (0 if everything else 1):
            yield self._tell(self._begun.popleft())

    def _tell(self, begun: Begun) -> Outcome:
        report, settings, step, batch, waited = begun
        agreed = report.read()
        spike, pending = self._progress.count_loss(agreed), agreed.pending
        must_rewind = self._progress.nonfinite >= NONFINITE_STEPS
        if not agreed.finite:
            self.last_bad = step, batch
        if must_rewind:  # which undoes what is under way, but for what was asked for
            for later in self._begun:
                pending = pending.also(later.report.read().pending)
            self._begun.clear()
        return Outcome(
            loss=agreed.loss,
            grad_norm=agreed.grad_norm,
            finite=agreed.finite,
            pending=pending,
            step=step,
            batch=batch,
            waited=waited,
            settings=settings,
            spike=spike,
            must_rewind=must_rewind,
        )
