"""Is the run well? A finite check before every update, agreed by all ranks, and a watch on spikes.

A loss or gradient that is not finite on any rank means no update on every rank. What follows, from
skipping a batch to rewinding to a checkpoint, is decided from numbers all ranks share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speedrun.train.world import World

SPIKE_WINDOW = 50  # finite losses a spike is measured against
SPIKE_LEAST = 20  # fewer than this say nothing
SPIKE_Z = 6.0


@dataclass(frozen=True)
class Agreement:
    """What all ranks know after a backward pass."""

    loss: float  # mean over all ranks and microbatches
    grad_norm: float
    finite: bool
    wishes: tuple[bool, ...]  # each true if any rank wished it


def agree(
    world: World, loss: Tensor, parameters: Iterable[Tensor], wishes: Sequence[bool]
) -> Agreement:
    """One small all-reduce: the global loss, whether all is finite, and what any rank asks for."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack([n.float() for n in torch._foreach_norm(gradients)]).norm()
    mine, size = loss.item(), norm.item()
    well = math.isfinite(mine) and math.isfinite(size)
    total, ill, *wished = world.sum([mine if math.isfinite(mine) else 0.0, not well, *wishes])
    return Agreement(
        loss=total / world.size if not ill else math.nan,
        grad_norm=size,  # after DDP's averaging every rank has the same gradient
        finite=not ill,
        wishes=tuple(value > 0 for value in wished),
    )


def spike(recent: Sequence[float], loss: float) -> float | None:
    """The z-score of a loss far above the recent finite ones, else None."""
    if len(recent) < SPIKE_LEAST or not math.isfinite(loss):
        return None
    mean = sum(recent) / len(recent)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in recent) / (len(recent) - 1))
    z = (loss - mean) / max(deviation, 1e-6)
    return z if z > SPIKE_Z else None


def remember(recent: list[float], loss: float) -> None:
    """Only finite losses enter the window: one NaN must not blind it for fifty steps."""
    if math.isfinite(loss):
        recent.append(loss)
        del recent[:-SPIKE_WINDOW]
