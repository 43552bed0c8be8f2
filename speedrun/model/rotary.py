"""Rotary positions: the pair of coordinates (i, i + K/2) is rotated by t * f_i at position t.

Full: f_i = 10000^(-2i/K) for all K/2 pairs. Half (records 17, 18): f_i = 1024^(-i/(K/4 - 1)) for
the first K/4 pairs, and the others are not rotated, so half the coordinates compare content
whatever the distance. Angles and rotation are fp32 whatever the activations are: in bf16,
positions past 256 could not be told apart.

Shapes: B batch, H heads, T time, K head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def frequencies(head_dim: int, half: bool) -> Tensor:
    """f_i of every pair, (K/2,)."""
    if half:
        pairs = head_dim // 4
        exponents = torch.linspace(0, 1, pairs, dtype=torch.float32)
        return torch.cat([1024.0**-exponents, torch.zeros(pairs)])
    return 10000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


class Rotary(nn.Module):
    """The cosines and sines of positions 0 to `length` - 1."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, length: int, half: bool) -> None:
        super().__init__()
        with torch.device("cpu"):  # also in a model without storage, which is asked for its sizes
            positions = torch.arange(length, dtype=torch.float32)
            angles = torch.outer(positions, frequencies(head_dim, half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def angles(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions `start` and on, each (count, K/2)."""
        return self.cos[start : start + count], self.sin[start : start + count]
