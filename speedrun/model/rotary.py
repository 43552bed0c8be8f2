"""Rotary positions: coordinate i is paired with i + K/2 and turned by t * f_i.

Full: f_i = 10000^(-2i/K) for all K/2 pairs. Half-truncated (records 17, 18): the first K/4 pairs
take f_j = 1024^(-j/(K/4 - 1)) and the rest stand still, so half the coordinates carry content
that no distance can blur. Angles are fp32 and so is the rotation, whatever the activations are:
bf16 angles lose whole positions past 256.

Shapes: B batch, H heads, T time, K head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speedrun.model.fused import rotate


def frequencies(head_dim: int, half: bool) -> Tensor:
    if half:
        turning = head_dim // 4
        exponents = torch.linspace(0, 1, turning, dtype=torch.float32)
        return torch.cat([1024.0**-exponents, torch.zeros(turning)])
    return 10000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


class Rotary(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, length: int, half: bool) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies(head_dim, half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x_BHTK: Tensor, start: int = 0, norm_eps: float | None = None) -> Tensor:
        """x from position `start` on, turned; with `norm_eps`, RMS-normed before (QK-norm)."""
        end = start + x_BHTK.size(-2)
        return rotate(x_BHTK, self.cos[start:end], self.sin[start:end], norm_eps)
