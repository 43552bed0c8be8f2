"""Keys and values of the tokens so far, kept by layer while sampling.

What is kept is what attention reads: keys after norm and rotation, values after mixing. A new token
then costs one row of everything instead of the whole context again.

Shapes: B batch, G key/value heads, T time, K head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class LayerCache:
    keys: Tensor  # (B, G, T, K)
    values: Tensor  # (B, G, T, K)
    length: int = 0

    def extend(self, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Add the newest tokens; returns all keys and values so far."""
        end = self.length + k_BGTK.size(2)
        self.keys[:, :, self.length : end] = k_BGTK
        self.values[:, :, self.length : end] = v_BGTK
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


def empty_caches(
    layers: int, rows: int, heads: int, length: int, head_dim: int
) -> list[LayerCache]:
    shape = (rows, heads, length, head_dim)
    return [LayerCache(torch.zeros(shape), torch.zeros(shape)) for _ in range(layers)]
