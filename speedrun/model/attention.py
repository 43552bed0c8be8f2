"""Attention: queries, keys and values from the stream, and the softmax over the keys a plan allows.

Legend: B rows, H query heads, G key/value heads, T tokens, D width, K head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from speedrun.config.architecture import ModelConfig
from speedrun.config.optimizer import Role
from speedrun.model.block_sparse import block_sparse_attention
from speedrun.model.cache import LayerCache
from speedrun.model.fused import blend, offset_keys, with_previous
from speedrun.model.linear import Linear, Norm
from speedrun.model.plan import LayerPlan
from speedrun.model.products import add_linear, norm_qkv, turn
from speedrun.model.rotary import Rotary


class Attention(nn.Module):
    """Multi-head attention with the records' additions to its keys and values."""

    parameter_roles: ClassVar[dict[str, Role]] = {"blend": "scalar"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.groups, self.head_dim = config.heads, config.groups, config.size_of_head
        self.qk_norm, self.eps = config.qk_norm, config.norm_eps
        self.scale = config.attention_scale or self.head_dim**-0.5
        self.residual = config.value_residual
        # Half-rotary positions rotate the pairs (i, i + K/2) for i < K/4 only, so the second and
        # the last quarter of a head are not rotated. Taken from the token before, they let a query
        # match that token and copy the value of the key itself: induction in one layer, which
        # takes two otherwise, one to look back and one to match.
        self.key_offset = config.key_offset
        depth = config.attention_output_factor == "depth"
        self.factor = (2 * config.layers) ** -0.5 if depth else 1.0
        queries, keys = self.heads * self.head_dim, self.groups * self.head_dim
        self.splits = [queries, keys, keys]
        sizes = [sum(self.splits)] if config.fused_qkv else self.splits
        roles: Sequence[Role] = ["qkv"] if config.fused_qkv else ["q", "k", "hidden"]
        self.qkv = nn.ModuleList(
            Linear(config.width, n, bias=config.bias, role=role)
            for n, role in zip(sizes, roles, strict=True)
        )
        self.output = Linear(
            queries, config.width, bias=config.bias, zero=config.zero_init_projections
        )
        self.blend: nn.Parameter | None = None
        if config.value_residual or config.value_embeddings != "none":
            weights = 2 if config.value_weights == "pair" else 1
            self.blend = nn.Parameter(torch.full((weights,), 0.5))

    def mix_values(self, v: Tensor, value_input: Tensor | None) -> Tensor:
        """v mixed with a value embedding or layer 0's values, by one learnt weight or two."""
        if self.blend is None:
            return v
        # 0-d weights, so that fp32 scalars leave bf16 values bf16.
        input_weight = self.blend[-1]
        own_weight = self.blend[0] if len(self.blend) == 2 else 1 - input_weight
        if value_input is None:
            mixed: Tensor = own_weight * v
            return mixed
        return blend(v, value_input.view_as(v).to(v.dtype), own_weight, input_weight)

    def forward(
        self,
        x_BTD: Tensor,
        norm: Norm,
        value_input: Tensor | None,
        rotary: Rotary | None,
        plan: LayerPlan,
        cache: LayerCache | None,
    ) -> tuple[Tensor, Tensor]:
        """x + attention(norm(x)), and this layer's own values before mixing, as (B, T, G, K).

        `value_input` is what the values are mixed with: the rows of a value embedding or the
        values of layer 0, of as many numbers as the own values.
        """
        B, T, _ = x_BTD.shape
        start = 0 if cache is None else cache.length
        angles = None if rotary is None else rotary.angles(start, T)
        q, k, own_values = self.project(x_BTD, norm, angles)
        if self.residual and value_input is None:  # layer 0, whose values the others get
            value_input = own_values
        v = self.mix_values(own_values, value_input)
        if self.key_offset:
            k = (
                offset_keys(k, plan.starts)
                if cache is None
                else offset_new_keys(k, plan.starts, cache)
            )
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(k, v)
        y_BHTK = attend(q, k, v, plan, self.scale)
        y_BTD = y_BHTK.transpose(1, 2).reshape(B, T, -1)
        if self.output.bias is None:
            return add_linear(x_BTD, y_BTD, self.output.weight, self.factor), own_values
        return x_BTD.add(self.output(y_BTD), alpha=self.factor), own_values

    def project(
        self, x_BTD: Tensor, norm: Norm, angles: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (B, T, heads, K)."""
        layers = [layer for layer in self.qkv if isinstance(layer, Linear)]
        if norm.gain is None and layers[0].bias is None:
            weights: Sequence[Tensor] = [layer.weight for layer in layers]
            if len(weights) == 1:
                weights = torch.split(weights[0], self.splits)
            return norm_qkv(
                x_BTD, weights, angles, self.head_dim, self.eps, norm.dtype, qk_norm=self.qk_norm
            )
        B, T, _ = x_BTD.shape
        normed_BTD = norm(x_BTD)
        parts: Sequence[Tensor] = [layer(normed_BTD) for layer in layers]
        if len(parts) == 1:
            parts = torch.split(parts[0], self.splits, dim=-1)
        q, k, v = (part.view(B, T, -1, self.head_dim) for part in parts)
        q, k = (turn(part, angles, self.eps if self.qk_norm else None) for part in (q, k))
        return q, k, v


def offset_new_keys(k_BTGK: Tensor, starts_BT: Tensor, cache: LayerCache) -> Tensor:
    """`offset_keys` of tokens that follow those in the cache."""
    before = torch.cat([cache.last_key.transpose(1, 2), k_BTGK[:, :-1]], dim=1)
    cache.last_key.copy_(k_BTGK[:, -1:].transpose(1, 2))
    return with_previous(k_BTGK, before, starts_BT)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: LayerPlan, scale: float) -> Tensor:
    """softmax(scale q k^T) v over the keys that the plan lets each query see; (B, H, T, K).

    With fewer key/value heads than query heads, H / G neighbouring query heads share one.
    """
    grouped = q.shape[1] != k.shape[1]
    if plan.backend == "blocks":
        assert isinstance(plan.mask, Tensor)
        return block_sparse_attention(q, k, v, plan.mask, scale)[0]
    if plan.backend == "dense":
        assert isinstance(plan.mask, Tensor)
        return scaled_dot_product_attention(
            q, k, v, attn_mask=plan.mask, scale=scale, enable_gqa=grouped
        )
    assert isinstance(plan.mask, BlockMask)
    flex: Any = flex_attention if torch.compiler.is_compiling() else compiled_flex()
    out = flex(q, k, v, block_mask=plan.mask, scale=scale, enable_gqa=grouped)
    assert isinstance(out, Tensor)
    return out


@functools.cache
def compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention for models that are not compiled: uncompiled it would compute every pair.

    Made at its first use, because torch.compile imports a compiler, which takes as long as torch.
    """
    return torch.compile(flex_attention)
