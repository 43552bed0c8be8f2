"""Where a run stands: with the weights and the optimizer's moments, the whole state of a run.

Schedules follow from `step` and the data from `batch`, so a checkpoint needs nothing else.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from speedrun.config.schema import Config
from speedrun.train.clock import Clock
from speedrun.train.crossing import Crossing, Look, crossing, next_look
from speedrun.train.health import SPIKE_WINDOW, Agreement, spike
from speedrun.train.validate import Validation


@dataclass
class Progress:
    step: int = 0  # updates done or skipped
    batch: int = 0  # global batches taken; ahead of `step` only after a rewind
    seconds: float = 0.0  # of training, by the clock
    earlier_wall: float = 0.0  # wall seconds of the processes this run was resumed from
    val_step: int = -1  # of the last validation; -1: none yet
    val_loss: float | None = None
    val_bpb: float | None = None
    looks: list[list[Any]] = field(default_factory=list)  # the last two validations, as `Look`
    next_look: int = 0  # step of a validation out of turn, since the target is due there
    to_target: dict[str, Any] | None = None  # the crossing, as `Crossing`; None: not reached yet
    first_below: int | None = None  # step of the first validation at or below the target
    recent: list[float] = field(default_factory=list)  # finite losses that spikes are measured by
    nonfinite: int = 0  # steps in a row without an update
    rewinds: int = 0
    forced: list[str] = field(default_factory=list)  # what resumes with --force overrode
    flops_done: float = 0.0  # of the steps beside which the peak was measured
    flops_possible: float = 0.0  # what the peak would have done in their seconds
    peak_seconds: float = 0.0  # spent on measuring, off the clock
    val_seconds: float = 0.0  # spent on validations, off the clock

    def count_step(self) -> None:
        """A step is under way; what comes of it is counted by `count_loss` when it is known."""
        self.step, self.batch = self.step + 1, self.batch + 1

    def count_loss(self, agreed: Agreement) -> float | None:
        """Take a step's numbers into account; the z-score of its loss if that is a spike."""
        if not agreed.finite:
            self.nonfinite += 1
            return None
        self.nonfinite = 0
        z = spike(self.recent, agreed.loss)
        self.recent = [*self.recent, agreed.loss][-SPIKE_WINDOW:]
        return z

    def count_validation(self, result: Validation, config: Config) -> None:
        self.val_step, self.val_loss, self.val_bpb = self.step, result.loss, result.bits_per_byte
        target, every = config.train.target, config.validation.every
        before = Look(*self.looks[-1]) if self.looks else None
        loss = result.loss if math.isfinite(result.loss) else None
        now = Look(self.step, loss, self.seconds, self.wall)
        self.looks = [*self.looks, [*now]][-2:]
        if not target or self.to_target:
            return
        if result.loss <= target:
            self.to_target, self.first_below = asdict(crossing(before, now, target)), self.step
        else:
            self.next_look = next_look(before, now, target, every)

    @property
    def crossed(self) -> Crossing | None:
        """Where the validation curve crossed the target."""
        return Crossing(**self.to_target) if self.to_target else None

    def count_peak(self, done: float, possible: float, seconds: float) -> None:
        """A stretch of steps, what it could have done at the peak, and what measuring that cost."""
        self.flops_done += done
        self.flops_possible += possible
        self.peak_seconds += seconds

    @property
    def peak_share(self) -> float | None:
        """Of all steps beside which the peak was measured."""
        return self.flops_done / self.flops_possible if self.flops_possible else None

    def go_back(self, saved: dict[str, Any]) -> None:
        """Be as a checkpoint saved it, but for the data, the clocks and the count of rewinds."""
        kept = {"batch", "seconds", "earlier_wall", "rewinds", "nonfinite", "forced",
                "flops_done", "flops_possible", "peak_seconds", "val_seconds"}  # fmt: skip
        for key in saved.keys() - kept:
            setattr(self, key, saved[key])
        self.nonfinite, self.rewinds = 0, self.rewinds + 1

    @property
    def wall(self) -> float:
        """Wall seconds so far, of all the processes whose work is still there."""
        return self.earlier_wall + Clock.wall()

    def to_save(self) -> dict[str, Any]:
        """Plain data; to the process that loads it, this one's wall seconds are earlier ones."""
        return {**asdict(self), "earlier_wall": self.wall}
