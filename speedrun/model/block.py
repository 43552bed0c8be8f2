"""One transformer block: mix in the embedding, then attention, then the MLP.

    x <- l0 x + l1 x0                      (x0_mixing)
    x <- x + f attention(norm(x))          (f: attention_output_factor)
    x <- x + mlp(norm(x))

Shapes: B batch, T time, D width, F hidden MLP width.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedrun.config.architecture import ModelConfig
from speedrun.config.optimizer import Role
from speedrun.model.attention import Attention
from speedrun.model.cache import LayerCache
from speedrun.model.fused import blend, relu_squared
from speedrun.model.linear import Linear, Norm
from speedrun.model.plan import LayerPlan
from speedrun.model.products import add_mlp
from speedrun.model.rotary import Rotary


class MLP(nn.Module):
    """Two linear layers with ReLU squared or GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.mlp_ratio * config.width
        self.up = Linear(config.width, hidden, bias=config.bias)
        self.down = Linear(
            hidden, config.width, bias=config.bias, zero=config.zero_init_projections
        )
        self.gelu = config.activation == "gelu"

    def forward(self, x_BTD: Tensor, norm: Norm) -> Tensor:
        """x + mlp(norm(x))."""
        plain = norm.gain is None and self.up.bias is None and not self.gelu
        if plain:
            return add_mlp(x_BTD, self.up.weight, self.down.weight, norm.eps, norm.dtype)
        h_BTF: Tensor = self.up(norm(x_BTD))
        y_BTD: Tensor = self.down(F.gelu(h_BTF) if self.gelu else relu_squared(h_BTF))
        return x_BTD + y_BTD


class Block(nn.Module):
    """A block as the formulas above say; some layers have no attention."""

    parameter_roles: ClassVar[dict[str, Role]] = {"mix": "scalar"}

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        attends = layer not in config.attention_free
        self.attention = Attention(config) if attends else None
        self.mlp = MLP(config)
        self.norm1 = Norm(config) if attends else None
        self.norm2 = Norm(config)
        self.mix = nn.Parameter(torch.tensor([1.0, 0.0])) if config.x0_mixing else None

    def forward(
        self,
        x: Tensor,
        x0: Tensor,
        value_input: Tensor | None,
        rotary: Rotary | None,
        plan: LayerPlan,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The stream after this block, and the attention's own values, if it has attention."""
        values = None
        if self.mix is not None:
            x = blend(x, x0, *self.mix)
        if self.attention is not None and self.norm1 is not None:
            x, values = self.attention(x, self.norm1, value_input, rotary, plan, cache)
        return self.mlp(x, self.norm2), values
