"""A finite check before every update, agreed by all ranks, and a watch on spikes of the loss.

A loss or gradient that is not finite on any rank means no update on every rank. What follows, from
skipping a batch to rewinding to a checkpoint, is decided from numbers all ranks share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from speedrun.config.schedule import Settings
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


def agree(world: World, loss: Tensor, parameters: Iterable[Tensor], pending: Pending) -> Agreement:
    """One small all-reduce: the global loss, whether all is finite, what any rank was asked for."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack([n.float() for n in torch._foreach_norm(gradients)]).norm()
    mine, size = loss.item(), norm.item()
    bad = not (math.isfinite(mine) and math.isfinite(size))
    total, nonfinite, *raised = world.sum([0.0 if bad else mine, bad, *pending])
    return Agreement(
        loss=math.nan if nonfinite else total / world.size,
        grad_norm=size,  # after DDP's averaging every rank has the same gradient
        finite=not nonfinite,
        pending=Pending(*(value > 0 for value in raised)),
    )


def heard(world: World, outcome: Outcome, pending: Pending) -> Outcome:
    """An outcome with what any rank has been asked for since; all ranks call this."""
    later = world.sum([*map(float, pending)])
    both = (before or after > 0 for before, after in zip(outcome.pending, later, strict=True))
    return replace(outcome, pending=Pending(*both))


def spike(recent: Sequence[float], loss: float) -> float | None:
    """The z-score of a finite loss far above the recent ones, else None."""
    if len(recent) < SPIKE_LEAST:
        return None
    mean = sum(recent) / len(recent)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in recent) / (len(recent) - 1))
    z = (loss - mean) / max(deviation, 1e-6)
    return z if z > SPIKE_Z else None
