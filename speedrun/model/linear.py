"""The linear layer and the norm that every block is made of.

Weights keep their own dtype (fp32 master weights) and are cast to that of what they multiply where
they are used: no autocast. What enters a product comes out of a norm, which gives it its dtype.
Initial values are PyTorch's default for linear layers, uniform in +-1/sqrt(fan_in), or zero.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedrun.config.architecture import ModelConfig
from speedrun.config.optimizer import Role
from speedrun.model.fused import rms_norm
from speedrun.model.products import linear


class Linear(nn.Module):
    """y = x W^T (+ b). `role` is the weight's (model/roles.py)."""

    def __init__(
        self, fan_in: int, fan_out: int, *, bias: bool, zero: bool = False, role: Role = "hidden"
    ) -> None:
        super().__init__()
        self.parameter_roles: dict[str, Role] = {"weight": role, "bias": "scalar"}
        self.zero = zero
        bound = 0.0 if zero else fan_in**-0.5
        self.weight = nn.Parameter(torch.empty(fan_out, fan_in).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(fan_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """Gain-free RMSNorm, or LayerNorm with gain (and bias)."""

    parameter_roles: ClassVar[dict[str, Role]] = {"gain": "scalar", "bias": "scalar"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.dtype = torch.float32  # of the products that follow: GPT.set_precision
        layer = config.norm == "layer"
        self.gain = nn.Parameter(torch.ones(config.width)) if layer else None
        self.bias = nn.Parameter(torch.zeros(config.width)) if layer and config.bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.gain is None:
            return rms_norm(x, self.eps).to(self.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        normed = F.layer_norm(x, (x.size(-1),), self.gain.to(x.dtype), bias, self.eps)
        return normed.to(self.dtype)
