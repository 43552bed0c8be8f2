"""Validation: the exact mean loss over fixed tokens, in nats per token and bits per byte.

Ranks take turns with the batches and add up nats, tokens and bytes, so the mean is that of the
tokens whatever the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from speedrun.data.loader import Batch
from speedrun.train.world import World


@dataclass(frozen=True)
class Validation:
    loss: float  # nats per token
    bits_per_byte: float | None  # None: the bytes of a token are not known
    tokens: int


@torch.no_grad()
def validate(
    loss_of: Callable[[Batch], Tensor],
    batches: Iterable[Batch],
    token_bytes: Tensor | None,
    world: World,
) -> Validation:
    """`loss_of` gives a batch's mean loss; `token_bytes` the UTF-8 bytes of each token id."""
    nats, tokens, size = 0.0, 0.0, 0.0
    for batch in islice(batches, world.rank, None, world.size):
        count = batch.targets.numel()
        nats += float(loss_of(batch)) * count
        tokens += count
        if token_bytes is not None:
            size += float(token_bytes[batch.targets].sum())
    nats, tokens, size = world.sum([nats, tokens, size])
    bits = nats / math.log(2) / size if size else None
    return Validation(nats / tokens, bits, round(tokens))
