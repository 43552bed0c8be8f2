"""A finite check before every update, agreed by all ranks, and a watch on spikes of the loss.

A loss or gradient that is not finite on any rank means no update on every rank. What follows, from
skipping a batch to rewinding to a checkpoint, is decided from numbers all ranks share.

On a GPU these numbers are not waited for: whether the update is made is decided there, by a tensor
that enters its arithmetic, and everybody else reads a step's report while the next one is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from speedrun.config.schedule import Settings
from speedrun.errors import RunError
from speedrun.train.gradients import Gradients
from speedrun.train.signals import Pending
from speedrun.train.world import World

SPIKE_WINDOW = 50  # finite losses a spike is measured against
SPIKE_LEAST = 20  # fewer than this say nothing
SPIKE_Z = 6.0


@dataclass(frozen=True)
class Agreement:
    """What all ranks know after a backward pass."""

    loss: float  # mean over all ranks and microbatches
    grad_norm: float
    finite: bool  # False: there is no update
    pending: Pending  # what was asked for on any rank


@dataclass(frozen=True)
class Outcome(Agreement):
    """What a step came to, the same on every rank: told by the trainer, read by loop and log."""

    step: int  # of the run, this one included
    batch: int
    waited: float  # seconds for data, since the run's process began
    settings: Settings
    spike: float | None  # z-score of a loss far above the recent ones
    must_rewind: bool

    @property
    def exit_code(self) -> int | None:
        """Of a stop that was asked for."""
        return self.pending.exit_code

    @property
    def save(self) -> bool:
        """A checkpoint is due, was asked for, or comes before a stop."""
        return self.pending.save or self.exit_code is not None

    @property
    def interrupts(self) -> bool:
        """Something is to be done before the next step."""
        return self.must_rewind or self.save

    def after(self, earlier: Outcome | None) -> Outcome:
        """This one, with what the one before it had asked for."""
        if earlier is None:
            return self
        must_rewind = self.must_rewind or earlier.must_rewind
        return replace(self, pending=self.pending.also(earlier.pending), must_rewind=must_rewind)


class Report:
    """A step's numbers, on their way from the device; `good` and `norm` stay there."""

    def __init__(self, numbers: Tensor, ranks: int) -> None:
        """`numbers`: loss, how many ranks met one that is not finite, what was asked for, norm."""
        self.good, self.norm = numbers[1] == 0, numbers[-1]
        self._numbers, self._ranks = numbers, ranks
        self._there: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._there.record()

    def read(self) -> Agreement:
        """Waits until the device has come to the end of the backward."""
        if self._there is not None:
            self._there.synchronize()
        total, nonfinite, *asked, norm = self._numbers.tolist()
        return Agreement(
            loss=math.nan if nonfinite else total / self._ranks,
            grad_norm=norm,
            finite=not nonfinite,
            pending=Pending(*(value > 0 for value in asked)),
        )


def agree(world: World, loss: Tensor, gradients: Gradients, pending: Pending) -> Report:
    """One small all-reduce: the global loss, whether all is finite, what any rank was asked for.

    Where ranks have gradients of their own their squares are in it, for the norm of them all.
    """
    norm = gradients.norm()
    bad = (loss.isfinite() & norm.isfinite()).logical_not()
    numbers = torch.zeros(3 + len(pending), dtype=torch.float64, device=loss.device)
    numbers[0], numbers[1] = loss.masked_fill(bad, 0.0), bad
    # As arguments of kernels: a tensor of them, or to assign one, would be a copy to wait for.
    for place, asked in enumerate(pending, start=2):
        numbers[place].fill_(float(asked))
    if gradients.split:
        numbers[-1] = norm.double().square()
        world.add_up(numbers)
        numbers[-1].sqrt_()
    else:
        numbers[-1] = norm
        world.add_up(numbers[:-1])
    return Report(numbers, world.size)


def refuse_unlike(world: World, digests: Sequence[tuple[str, float]], when: str) -> None:
    """Ranks must have come to the same with each of these optimizers; all ranks call this."""
    for called, digest in digests:
        found = world.gather(digest)
        other = next((rank for rank, d in enumerate(found) if d != found[0]), None)
        if other is None:
            continue
        report = (
            f"{when} rank {other} has other weights or another state than rank 0: {called} does "
            "not do the same on every rank; run it on one, or make it depend on nothing but "
            "weights, gradients and its state"
        )
        with world.together():
            raise RunError(report)


def heard(world: World, outcome: Outcome, pending: Pending) -> Outcome:
    """An outcome with what any rank has been asked for since; all ranks call this."""
    later = world.sum([*map(float, pending)])
    asked = Pending(*(value > 0 for value in later))
    return replace(outcome, pending=outcome.pending.also(asked))


def spike(recent: Sequence[float], loss: float) -> float | None:
    """The z-score of a finite loss far above the recent ones, else None."""
    if len(recent) < SPIKE_LEAST:
        return None
    mean = sum(recent) / len(recent)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in recent) / (len(recent) - 1))
    z = (loss - mean) / max(deviation, 1e-6)
    return z if z > SPIKE_Z else None
