"""Block-sparse attention for CPUs, whose cost is proportional to the pairs that are seen.

Query t sees the keys first[t] .. t (model/mask.py). The native kernel works in tiles of 64 by 64;
where it cannot be built, chunks of queries go with the slice of keys they see to torch's own CPU
flash attention. Both hold the scores of one tile or chunk at a time, and save the logsumexp of
every query for the backward. As custom operators they do not break a compiled model's graph.

Legend: B rows, H query heads, KV key/value heads, T tokens, K head width.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from speedrun.model import native
from speedrun.model.native.operators import differentiate, operator

# Forward + backward at 8,192 tokens, documents of 500: 96 to 192 are level, 320 a quarter slower.
CHUNK = 128
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def kernel_for(width: int) -> native.Kernel | str:
    """The native kernel for this head width, or why it cannot be used."""
    if width % native.WIDTH_STEP or width > native.MAX_WIDTH:
        step, most = native.WIDTH_STEP, native.MAX_WIDTH
        return f"head dim {width} is not a multiple of {step} up to {most}"
    return native.load()


def _like(x_BHTK: Tensor) -> Tensor:
    """Uninitialised, laid out in memory as (B, T, H, K), which the layers before and after use."""
    B, H, T, K = x_BHTK.shape
    return x_BHTK.new_empty(B, T, H, K).transpose(1, 2)


def _unit_stride(x_BHTK: Tensor) -> Tensor:
    return x_BHTK if x_BHTK.stride(3) == 1 else x_BHTK.contiguous()


def _like_output(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _like(q), q.new_empty(q.shape[:3])


@operator("block_sparse_attention", like=_like_output)
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, first_BT: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention output (B, H, T, K), and the logsumexp of the scores (B, H, T)."""
    if first_BT.shape != (q.shape[0], q.shape[2]):
        raise ValueError(
            f"one first key per query, not {tuple(first_BT.shape)} for {tuple(q.shape)}"
        )
    q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
    out, lse = _like(q), q.new_empty(q.shape[:3])
    kernel = kernel_for(q.shape[3])
    if not isinstance(kernel, str):
        kernel.attention("attention_forward", q, k, v, first_BT.contiguous(), scale, out, lse)
        return out, lse
    for queries, keys, bias in _chunks(first_BT, q.dtype):
        k_seen, v_seen = (_per_query_head(x[:, :, keys], q.shape[1]) for x in (k, v))
        out[:, :, queries], lse[:, :, queries] = flash(
            q[:, :, queries], k_seen, v_seen, attn_mask=bias, scale=scale
        )
    return out, lse


def _like_gradients(
    _dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


@operator("block_sparse_attention_backward", like=_like_gradients)
def block_sparse_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_BT: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    dout, q, k, v = (_unit_stride(x) for x in (dout, q, k, v))
    dq, dk, dv = _like(q), _like(k), _like(v)
    kernel = kernel_for(q.shape[3])
    if not isinstance(kernel, str):
        known = (q, k, v, first_BT.contiguous(), scale, out, lse.contiguous(), dout)
        kernel.attention("attention_backward", *known, dq, dk, dv)
        return dq, dk, dv
    dk.zero_(), dv.zero_()
    for queries, keys, bias in _chunks(first_BT, q.dtype):
        k_seen, v_seen = (_per_query_head(x[:, :, keys], q.shape[1]) for x in (k, v))
        g, q_part, o_part, lse_part = (x[:, :, queries] for x in (dout, q, out, lse))
        tensors, dropout, causal = (g, q_part, k_seen, v_seen, o_part, lse_part), 0.0, False
        dq[:, :, queries], dk_seen, dv_seen = flash_backward(
            *tensors, dropout, causal, attn_mask=bias, scale=scale
        )
        # In place: autograd through slices would add a full-length tensor per chunk instead.
        dk[:, :, keys] += _per_key_head(dk_seen, k.shape[1])
        dv[:, :, keys] += _per_key_head(dv_seen, k.shape[1])
    return dq, dk, dv


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, first_BT, scale = inputs
    ctx.save_for_backward(q, k, v, first_BT, *output)
    ctx.scale = scale


def _gradients(ctx, dout: Tensor, _dlse: Tensor):  # type: ignore[no-untyped-def]
    q, k, v, first_BT, out, lse = ctx.saved_tensors
    gradients = block_sparse_attention_backward(dout, q, k, v, first_BT, ctx.scale, out, lse)
    return *gradients, None, None


differentiate("block_sparse_attention", _gradients, keep=_save)


def _per_query_head(x_BKVTK: Tensor, heads: int) -> Tensor:
    groups = heads // x_BKVTK.shape[1]
    return x_BKVTK if groups == 1 else x_BKVTK.repeat_interleave(groups, 1)


def _per_key_head(x_BHTK: Tensor, heads: int) -> Tensor:
    B, H, T, K = x_BHTK.shape
    return x_BHTK if heads == H else x_BHTK.reshape(B, heads, H // heads, T, K).sum(2)


def _chunks(first_BT: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, slice, Tensor]]:
    """Runs of queries, the keys that any row's queries in the run see, and 0 or -inf per pair."""
    T = first_BT.shape[1]
    t_T, never = torch.arange(T, dtype=torch.int32), torch.tensor(-torch.inf, dtype=dtype)
    for begin, first in zip(range(0, T, CHUNK), first_BT[:, ::CHUNK].amin(0).tolist(), strict=True):
        end = min(begin + CHUNK, T)
        k, q = t_T[first:end], t_T[begin:end, None]
        hidden = (k > q) | (k < first_BT[:, None, begin:end, None])
        yield slice(begin, end), slice(first, end), torch.where(hidden, never, 0)
