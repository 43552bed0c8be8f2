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
    newest: Tensor | None = None  # (B, G, 1, K), the newest key before its offset

    def extend(self, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Add the newest tokens; returns all keys and values so far."""
        end = self.length + k_BGTK.size(2)
        self.keys[:, :, self.length : end] = k_BGTK
        self.values[:, :, self.length : end] = v_BGTK
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class Cache:
    """All layers' keys and values, and the newest token: what the next one looks back at."""

    def __init__(self, layers: int, rows: int, heads: int, length: int, head_dim: int) -> None:
        shape = (rows, heads, length, head_dim)
        self.layers = [LayerCache(torch.zeros(shape), torch.zeros(shape)) for _ in range(layers)]
        self.length = 0
        self.newest_B1 = torch.full((rows, 1), -1)

    def take(self, ids_BT: Tensor) -> None:
        """The tokens the layers have just been given."""
        self.length += ids_BT.size(1)
        self.newest_B1 = ids_BT[:, -1:]
