"""Validation: the exact mean loss over fixed tokens, in nats per token and bits per byte.

Ranks take turns with the batches and put nats, tokens and bytes together in the batches' order, so
the mean is that of the tokens, to the last bit, whatever the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from speedrun.data.loader import Batch
from speedrun.data.validation import ValidationBatches
from speedrun.train.world import World


@dataclass(frozen=True)
class Validation:
    loss: float  # nats per token
    bits_per_byte: float | None  # None: the bytes of a token are not known
    tokens: int


@torch.no_grad()
def validate(
    loss_of: Callable[[Batch], Tensor],
    batches: ValidationBatches,
    token_bytes: Tensor | None,
    world: World,
) -> Validation:
    """`loss_of` gives a batch's mean loss; `token_bytes` the UTF-8 bytes of each token id."""
    # One place for each batch, filled by the rank that has it: the sum over ranks only adds zeros,
    # and the sum over batches is taken in their order, whoever computed them.
    nats, tokens, size = ([0.0] * len(batches) for _ in range(3))
    for index, batch in batches.of_rank(world.rank, world.size):
        tokens[index] = batch.targets.numel()
        nats[index] = float(loss_of(batch)) * tokens[index]
        if token_bytes is not None:
            size[index] = float(token_bytes[batch.targets].sum())
    sums, n = world.sum([*nats, *tokens, *size]), len(batches)
    total, count, length = (sum(sums[i : i + n]) for i in (0, n, 2 * n))
    bits = total / math.log(2) / length if length else None
    return Validation(total / count, bits, round(count))
