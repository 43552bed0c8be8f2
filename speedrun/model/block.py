"""One transformer block: mix with the embedding, attend, think.

    x <- l0 x + l1 x0                      (x0_mixing)
    x <- x + f attention(norm(x))          (f: attention_output_factor)
    x <- x + mlp(norm(x))

Shapes: B batch, T time, D width, F hidden MLP width, K head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedrun.config.schema import ModelConfig
from speedrun.model.attention import AttentionPlan, attend
from speedrun.model.cache import LayerCache
from speedrun.model.fused import relu_squared, rms_norm
from speedrun.model.linear import Linear, Norm
from speedrun.model.rotary import Rotary


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.groups, self.head_dim = config.heads, config.groups, config.size_of_head
        self.qk_norm, self.eps = config.qk_norm, config.norm_eps
        self.scale = config.attention_scale or self.head_dim**-0.5
        self.residual, self.key_offset = config.value_residual, config.key_offset
        queries, keys = self.heads * self.head_dim, self.groups * self.head_dim
        self.splits = [queries, keys, keys]
        sizes = [sum(self.splits)] if config.fused_qkv else self.splits
        role = "qkv" if config.fused_qkv else "hidden"
        self.qkv = nn.ModuleList(
            Linear(config.width, n, bias=config.bias, role=role) for n in sizes
        )
        self.output = Linear(
            queries, config.width, bias=config.bias, zero=config.zero_init_projections
        )
        self.blend: nn.Parameter | None = None
        if config.value_residual or config.value_embeddings != "none":
            self.blend = nn.Parameter(
                torch.full((2 if config.value_weights == "pair" else 1,), 0.5)
            )

    def mix_values(self, v: Tensor, other: Tensor | None) -> Tensor:
        """v with a value embedding or layer 0's values, by one learnt weight or two."""
        if self.blend is None:
            return v
        # 0-d weights, so that fp32 scalars leave bf16 values bf16.
        theirs = self.blend[-1]
        mine = self.blend[0] if len(self.blend) == 2 else 1 - theirs
        mixed: Tensor = mine * v if other is None else mine * v + theirs * other.view_as(v)
        return mixed

    def forward(
        self,
        x_BTD: Tensor,
        other: Tensor | None,
        rotary: Rotary | None,
        plan: AttentionPlan,
        cache: LayerCache | None,
    ) -> tuple[Tensor, Tensor]:
        B, T, _ = x_BTD.shape
        parts = [project(x_BTD) for project in self.qkv]
        q, k, v = (
            part.view(B, T, -1, self.head_dim)
            for part in (parts[0].split(self.splits, dim=-1) if len(parts) == 1 else parts)
        )
        own = v
        v = self.mix_values(v, own if self.residual and other is None else other)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if rotary is not None:
            start = 0 if cache is None else cache.length
            q, k = (rotary(x, start, self.eps if self.qk_norm else None) for x in (q, k))
        elif self.qk_norm:
            q, k = rms_norm(q, self.eps), rms_norm(k, self.eps)
        if self.key_offset:
            k = offset_keys(k, plan.opens, cache)
        if cache is not None:
            k, v = cache.extend(k, v)
        y_BHTK = attend(q, k, v, plan, self.scale)
        return self.output(y_BHTK.transpose(1, 2).reshape(B, T, -1)), own


def offset_keys(k_BGTK: Tensor, opens_BT: Tensor, cache: LayerCache | None) -> Tensor:
    """Keys whose still half is that of the token before: a token is found by what it followed.

    One layer then copies what came after an earlier "this"; without the offset it takes two, one
    to look back and one to match. Coordinate i turns with i + K/2, and of those pairs the second
    half stands still. A token that opens a document keeps its own.
    """
    first = k_BGTK[:, :, :1] if cache is None or cache.newest is None else cache.newest
    if cache is not None:
        cache.newest = k_BGTK[:, :, -1:]
    past_BGTK = torch.cat([first, k_BGTK[:, :, :-1]], dim=2)
    past_BGTK = torch.where(opens_BT[:, None, :, None], k_BGTK, past_BGTK)
    parts = zip(k_BGTK.chunk(4, dim=-1), past_BGTK.chunk(4, dim=-1), strict=True)
    return torch.cat([(own, past)[i % 2] for i, (own, past) in enumerate(parts)], dim=-1)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.mlp_ratio * config.width
        self.up = Linear(config.width, hidden, bias=config.bias)
        self.down = Linear(
            hidden, config.width, bias=config.bias, zero=config.zero_init_projections
        )
        self.gelu = config.activation == "gelu"

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF: Tensor = self.up(x_BTD)
        y_BTD: Tensor = self.down(F.gelu(h_BTF) if self.gelu else relu_squared(h_BTF))
        return y_BTD


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        attends = layer not in config.attention_free
        self.attention = Attention(config) if attends else None
        self.mlp = MLP(config)
        self.norm1 = Norm(config) if attends else None
        self.norm2 = Norm(config)
        depth = config.attention_output_factor == "depth"
        self.factor = (2 * config.layers) ** -0.5 if depth else 1.0
        self.mix = nn.Parameter(torch.tensor([1.0, 0.0])) if config.x0_mixing else None

    def forward(
        self,
        x: Tensor,
        x0: Tensor,
        other: Tensor | None,
        rotary: Rotary | None,
        plan: AttentionPlan,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        values = None
        if self.mix is not None:
            x = self.mix[0] * x + self.mix[1] * x0
        if self.attention is not None and self.norm1 is not None:
            y, values = self.attention(self.norm1(x), other, rotary, plan, cache)
            x = x.add(y, alpha=self.factor)  # one pass, and none for a factor of 1 in the backward
        return x + self.mlp(self.norm2(x)), values
