"""One attention, three backends, chosen by device.

`plan_attention` turns a batch's documents and window into what the backend wants, once for all
layers and the backward; `attend` applies it.
  flex    FlexAttention, compiled: CUDA.
  blocks  our own block-sparse attention: CPU (model/blocks.py).
  dense   the full T x T mask: the reference, for tests, tiny inputs and other devices.

Legend: B rows, H query heads, KV key/value heads, T tokens, K head width.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from speedrun.errors import ConfigError
from speedrun.model import blocks
from speedrun.model.mask import BLOCK, WindowRule, block_lists, dense_mask, first_key

Backend = Literal["flex", "blocks", "dense"]
DENSE_TOKENS = 4096  # a mask of 16.8 million pairs per row; four times that per doubling


@dataclass(frozen=True)
class AttentionPlan:
    """Who sees whom in one batch, in the backend's own terms."""

    backend: Backend
    mask: Tensor | BlockMask  # blocks: first key (B, T); dense: booleans (B, 1, T, T)
    opens: Tensor  # booleans (B, T): the token opens a row or a document, none is before it


def choose_backend(
    device: torch.device,
    requested: str = "auto",
    *,
    tokens: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Backend, str]:
    """The backend for rows of `tokens` tokens, with the reason that logs and `doctor` print."""
    if requested not in ("auto", *get_args(Backend)):
        allowed = ", ".join(("auto", *get_args(Backend)))
        raise ConfigError(f"attention backend {requested!r} is unknown; choose one of {allowed}.")
    own: Backend = {"cuda": "flex", "cpu": "blocks"}.get(device.type, "dense")  # type: ignore[assignment]
    chosen: Backend = own if requested == "auto" else requested  # type: ignore[assignment]
    if chosen == "flex" and device.type != "cuda":
        raise ConfigError(
            f"attention backend 'flex' has no backward on {device.type}; use {own!r} there."
        )
    if chosen == "blocks" and device.type != "cpu":
        raise ConfigError(
            f"attention backend 'blocks' runs on cpu only; use {own!r} on {device.type}."
        )
    if chosen == "blocks" and dtype != torch.float32:
        raise ConfigError(
            f"attention backend 'blocks' computes in torch.float32, not {dtype}; "
            "set the precision to fp32 on cpu."
        )
    if chosen == "dense" and tokens > DENSE_TOKENS:
        raise ConfigError(
            f"attention backend 'dense' holds every pair of a row and takes at most {DENSE_TOKENS} "
            f"tokens, not {tokens}; shorten the rows or use 'blocks' (cpu) or 'flex' (cuda)."
        )
    why = f"chosen for {device.type}" if requested == "auto" else "asked for"
    how = {
        "flex": "compiled FlexAttention on full and partial 128-token blocks",
        "blocks": blocks.prepare(head_dim) if chosen == "blocks" else "",
        "dense": f"every pair of at most {DENSE_TOKENS} tokens, masked",
    }[chosen]
    return chosen, f"{why}: {how}"


def plan_attention(
    backend: Backend, documents_BT: Tensor, window: Tensor | None, rule: WindowRule = "blocks"
) -> AttentionPlan:
    """Who sees whom, built in or out of compiled code.

    `window` is data, a 0-d integer tensor: a new value recompiles nothing.
    """
    opens_BT = opening(documents_BT)
    if backend == "dense":
        return AttentionPlan(backend, dense_mask(documents_BT, window, rule)[:, None], opens_BT)
    first_BT = first_key(documents_BT, window, rule)
    mask = first_BT if backend == "blocks" else flex_mask(first_BT)
    return AttentionPlan(backend, mask, opens_BT)


def opening(documents_BT: Tensor) -> Tensor:
    """Which tokens are the first of their row or document."""
    return torch.diff(documents_BT, prepend=documents_BT[:, :1] - 1, dim=1) != 0


def flex_mask(first_BT: Tensor) -> BlockMask:
    """FlexAttention's mask from our block lists; only partial blocks look at single pairs."""

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001
        return (k <= q) & (k >= first_BT[b, q])

    lists = block_lists(first_BT)
    T = first_BT.shape[1]
    partial_count, partial_index, full_count, full_index = (x[:, None] for x in lists)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_index,
        full_count,
        full_index,
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(T, T),
    )


@functools.cache
def compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention outside of a compiled model, where plain it falls back to holding every pair.

    Made when it is first used: torch.compile imports a compiler, which takes as long as torch.
    """
    return torch.compile(flex_attention)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """softmax(scale q k^T) v over what the plan lets each query see; (B, H, T, K).

    With fewer key/value heads than query heads, H / KV neighbouring query heads share one.
    """
    grouped = q.shape[1] != k.shape[1]
    if plan.backend == "blocks":
        assert isinstance(plan.mask, Tensor)
        out: Tensor = blocks.blocks(q, k, v, plan.mask, scale)[0]
        return out
    if plan.backend == "dense":
        assert isinstance(plan.mask, Tensor)
        return scaled_dot_product_attention(
            q, k, v, attn_mask=plan.mask, scale=scale, enable_gqa=grouped
        )
    assert isinstance(plan.mask, BlockMask)
    flex: Callable[..., Any] = flex_attention
    if not torch.compiler.is_compiling():
        flex = compiled_flex()
    out = flex(q, k, v, block_mask=plan.mask, scale=scale, enable_gqa=grouped)
    assert isinstance(out, Tensor)
    return out
