"""The key/value cache of sampling, by layer.

It holds what attention reads: keys after norm and rotation, values after mixing. A new token is
then computed alone instead of with its whole context again.

Shapes: B batch, G key/value heads, T time, K head dim.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class LayerCache:
    """One layer's keys and values, of which the first `length` tokens are filled."""

    keys: Tensor  # (B, G, T, K)
    values: Tensor  # (B, G, T, K)
    last_key: Tensor  # (B, G, 1, K): the last token's, before key_offset
    length: int = 0

    def extend(self, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Put new tokens behind the others; returns all keys and values so far."""
        end = self.length + k_BGTK.size(2)
        self.keys[:, :, self.length : end] = k_BGTK
        self.values[:, :, self.length : end] = v_BGTK
        return self.keys[:, :, :end], self.values[:, :, :end]


class Cache:
    """All layers' keys and values, and the last token, which the bigram table needs.

    Its tensors stay where they are, so that native code may be told once where that is.
    """

    def __init__(self, layers: int, rows: int, heads: int, length: int, head_dim: int) -> None:
        shape, last = (rows, heads, length, head_dim), (rows, heads, 1, head_dim)
        self.layers = [
            LayerCache(torch.zeros(shape), torch.zeros(shape), torch.zeros(last))
            for _ in range(layers)
        ]
        self.length = 0
        self.last_B1 = torch.full((rows, 1), -1)

    def advance(self, ids_BT: Tensor) -> None:
        """Count the tokens that the layers have just been given."""
        self._count(self.length + ids_BT.size(1))
        self.last_B1.copy_(ids_BT[:, -1:])

    def advance_to(self, length: int, last: int) -> None:
        """So many tokens are there now, the last of which is this one."""
        self._count(length)
        self.last_B1.fill_(last)

    def row(self, index: int) -> Cache:
        """One row alone, which counts its own tokens; its tensors are views of these."""
        alone = copy(self)
        one = slice(index, index + 1)
        alone.last_B1 = self.last_B1[one]
        alone.layers = [
            LayerCache(layer.keys[one], layer.values[one], layer.last_key[one])
            for layer in self.layers
        ]
        return alone

    def clear(self) -> None:
        """Forget all tokens."""
        self._count(0)

    def _count(self, length: int) -> None:
        self.length = length
        for layer in self.layers:
            layer.length = length
