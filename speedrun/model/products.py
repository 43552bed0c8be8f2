"""Matrix products, with what stands right before and after them: linear layers, the MLP, the loss.

Each function states its formula in torch; that code runs on GPUs, in bf16 and wherever there is no
C++ compiler. On a CPU in fp32 native routines (native/linear.cpp, native/loss.cpp) take some rows
of the batch at a time through the whole formula, so that what lies between two products is read
and written in cache. The logits of a batch are then never in memory together, forward or backward.

Shapes: B batch, T time, D width, H heads, G key/value heads, K head dim, F hidden MLP width, V
vocabulary, N tokens of the whole batch, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from speedrun.model import kernels, native
from speedrun.model.fused import native_for, relu_squared, rms_norm, rotate, softcap
from speedrun.model.kernels.loss import head_loss as kernel_head_loss
from speedrun.model.kernels.mlp import mlp as kernel_mlp
from speedrun.model.native.operators import differentiate, operator

FEWEST = 32  # rows
SOME = 256  # rows of logits in memory at once where each row's loss is wanted


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T (+ b), in the type of x."""
    if bias is None and _native_for(x, weight):
        return _linear(x.reshape(-1, x.size(-1)), weight).view(*x.shape[:-1], len(weight))
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def add_linear(x: Tensor, h: Tensor, weight: Tensor, factor: float) -> Tensor:
    """x + factor h W^T: a branch's last layer, added to the stream."""
    if _native_for(x, weight) and h.dtype == x.dtype:
        wide = _add_linear(x.flatten(0, -2), h.flatten(0, -2), weight, factor)
        return wide.view_as(x)
    return x.add(linear(h, weight), alpha=factor)


def norm_qkv(
    x_BTD: Tensor,
    weights: Sequence[Tensor],
    angles: tuple[Tensor, Tensor] | None,
    head_dim: int,
    eps: float,
    dtype: torch.dtype = torch.float32,
    *,
    qk_norm: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of norm(x), each (B, T, heads, K), multiplied in `dtype`.

    Queries and keys are normed head by head if `qk_norm`, then rotated by the angles of their
    positions, (cosines, sines), if there are any. All norms are RMSNorm without gain.
    """
    B, T, _ = x_BTD.shape
    cos_TK, sin_TK = angles or (None, None)
    if dtype == torch.float32 and _native_for(x_BTD, *weights):
        wq, wk, wv = weights
        return _norm_qkv(x_BTD, wq, wk, wv, cos_TK, sin_TK, eps, head_dim, qk_norm)[:3]
    normed_BTD = rms_norm(x_BTD, eps).to(dtype)
    q, k, v = (linear(normed_BTD, weight).view(B, T, -1, head_dim) for weight in weights)
    return *(turn(y, angles, eps if qk_norm else None) for y in (q, k)), v  # type: ignore[return-value]


def turn(x_BTHK: Tensor, angles: tuple[Tensor, Tensor] | None, eps: float | None) -> Tensor:
    """Heads normed if there is an eps, then rotated if there are angles."""
    if angles is not None:
        return rotate(x_BTHK.transpose(1, 2), *angles, eps).transpose(1, 2)
    return x_BTHK if eps is None else rms_norm(x_BTHK, eps)


def add_mlp(
    x_BTD: Tensor,
    up_FD: Tensor,
    down_DF: Tensor,
    eps: float,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """x + down relu(up norm(x))^2 multiplied in `dtype`, the norm being RMSNorm without gain."""
    if kernels.multiply(x_BTD, dtype):
        normed_ND = rms_norm(x_BTD, eps).to(dtype).flatten(0, -2)
        return x_BTD + kernel_mlp(normed_ND, up_FD, down_DF).view_as(x_BTD)
    if dtype == torch.float32 and _native_for(x_BTD, up_FD, down_DF):
        return _add_mlp(x_BTD.flatten(0, -2), up_FD, down_DF, eps)[0].view_as(x_BTD)
    hidden_BTF = relu_squared(linear(rms_norm(x_BTD, eps).to(dtype), up_FD))
    return x_BTD + linear(hidden_BTF, down_DF)


def head_loss(x_BTD: Tensor, head_VD: Tensor, targets_BT: Tensor, cap: float) -> Tensor:
    """Mean loss in nats per token of softcapped logits, the softmax in fp32; all targets count.

    The native routine takes the gradients along with the loss, while the logits are there: a
    backward pass only multiplies them by its own gradient.
    """
    x_ND, targets_N = x_BTD.flatten(0, 1), targets_BT.flatten()
    if kernels.on(x_ND):
        one = x_ND.new_ones(1, dtype=torch.float32)
        return kernel_head_loss(x_ND, head_VD, targets_N[None], one, cap)
    if _native_for(x_BTD, head_VD[:0]):  # any vocabulary will do
        with_gradients = torch.is_grad_enabled() and (x_BTD.requires_grad or head_VD.requires_grad)
        return _head_loss(x_ND, head_VD, targets_N, cap, with_gradients)[0]
    logits_NV = softcap(F.linear(x_ND, head_VD.to(x_ND.dtype)), cap)
    return F.cross_entropy(logits_NV.float(), targets_N)


def token_losses(x_ND: Tensor, head_VD: Tensor, targets_N: Tensor, cap: float) -> Tensor:
    """The loss of every token by itself, (N,) in fp32, to be looked at: it has no gradient."""
    x_ND, head_VD = x_ND.detach(), head_VD.detach()
    if _native_for(x_ND, head_VD[:0]):
        return _token_losses(x_ND, head_VD, targets_N, cap)
    losses = [
        F.cross_entropy(
            softcap(F.linear(x, head_VD.to(x.dtype)), cap).float(), targets, reduction="none"
        )
        for x, targets in zip(torch.split(x_ND, SOME), torch.split(targets_N, SOME), strict=True)
    ]
    return torch.cat(losses)


def _native_for(x: Tensor, *weights: Tensor) -> bool:
    """Whether the routines can compute on these: both sides of a weight are whole vectors.

    They rearrange a weight before they use it, which a handful of rows does not repay.
    """
    whole = all(size % native.WIDTH_STEP == 0 for weight in weights for size in weight.shape)
    alike = all(weight.dtype == torch.float32 for weight in weights)
    return whole and alike and native_for(x) and x.numel() >= FEWEST * x.size(-1)


# Below: the native routines as operators, and the registration of their gradients.


@operator("linear", like=lambda x_NI, w_OI: x_NI.new_empty(len(x_NI), len(w_OI)))
def _linear(x_NI: Tensor, w_OI: Tensor) -> Tensor:
    y_NO = x_NI.new_empty(len(x_NI), len(w_OI))
    native.run("linear_forward", x_NI, w_OI, None, 1.0, y_NO, len(x_NI), *reversed(w_OI.shape))
    return y_NO


def _like_both(_g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), w.new_empty(w.shape)


@operator("linear_backward", like=_like_both)
def _linear_backward(g_NO: Tensor, x_NI: Tensor, w_OI: Tensor) -> tuple[Tensor, Tensor]:
    dx_NI, dw_OI = _like_both(g_NO, x_NI, w_OI)
    sizes = len(x_NI), *reversed(w_OI.shape)
    native.run("linear_backward", g_NO, x_NI, w_OI, dx_NI, dw_OI, *sizes)
    return dx_NI, dw_OI


@operator("add_linear", like=lambda x, _h, _w, _factor: x.new_empty(x.shape))
def _add_linear(x_NO: Tensor, h_NI: Tensor, w_OI: Tensor, factor: float) -> Tensor:
    y_NO = x_NO.new_empty(x_NO.shape)
    sizes = len(x_NO), *reversed(w_OI.shape)
    native.run("linear_forward", h_NI, w_OI, x_NO, factor, y_NO, *sizes)
    return y_NO


Qkv = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _like_norm_qkv(
    x_BTD: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, _c: object, _s: object, _eps: float,
    head_dim: int, qk_norm: bool,
) -> Qkv:  # fmt: skip
    B, T, _ = x_BTD.shape
    heads = [len(weight) // head_dim for weight in (wq, wk, wv)]
    outputs = [x_BTD.new_empty(B, T, count, head_dim) for count in heads]
    scales = [x_BTD.new_empty((B, T, count) if qk_norm else (0,)) for count in heads[:2]]
    return *outputs, x_BTD.new_empty(B, T), *scales  # type: ignore[return-value]


@operator("norm_qkv", like=_like_norm_qkv)
def _norm_qkv(
    x_BTD: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    cos_TK: Tensor | None,
    sin_TK: Tensor | None,
    eps: float,
    head_dim: int,
    qk_norm: bool,
) -> Qkv:
    """q, k, v; and for the backward 1 / rms of x, and of each head of q and k."""
    T = x_BTD.size(1)
    if cos_TK is not None and cos_TK.shape != (T, head_dim // 2):
        raise ValueError(f"there are angles for {len(cos_TK)} tokens, but the row has {T}")
    q, k, v, r, rq, rk = outputs = _like_norm_qkv(
        x_BTD, wq, wk, wv, cos_TK, sin_TK, eps, head_dim, qk_norm
    )
    kept = (rq, rk) if qk_norm else (None, None)
    known = (x_BTD, wq, wk, wv, cos_TK, sin_TK, eps, r, q, k, v, *kept)
    native.run("qkv_forward", *known, *_qkv_sizes(x_BTD, q, k))
    return outputs


def _qkv_sizes(x_BTD: Tensor, q_BTHK: Tensor, k_BTGK: Tensor) -> tuple[int, ...]:
    B, T, D = x_BTD.shape
    return B * T, T, D, *q_BTHK.shape[2:3], *k_BTGK.shape[2:]


def _like_norm_qkv_backward(
    _dq: Tensor, _dk: Tensor, _dv: Tensor, _q: Tensor, _k: Tensor, _rq: Tensor, _rk: Tensor,
    x: Tensor, _r: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return tuple(t.new_empty(t.shape) for t in (x, wq, wk, wv))  # type: ignore[return-value]


@operator("norm_qkv_backward", like=_like_norm_qkv_backward)
def _norm_qkv_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, q: Tensor, k: Tensor, rq: Tensor, rk: Tensor,
    x_BTD: Tensor, r: Tensor, wq: Tensor, wk: Tensor, wv: Tensor,
    cos_TK: Tensor | None, sin_TK: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    gradients = _like_norm_qkv_backward(dq, dk, dv, q, k, rq, rk, x_BTD, r, wq, wk, wv)
    kept = (rq, rk) if rq.numel() else (None, None)
    known = (dq, dk, dv, q, k, *kept, x_BTD, r, wq, wk, wv, cos_TK, sin_TK)
    native.run("qkv_backward", *known, *gradients, *_qkv_sizes(x_BTD, q, k))
    return gradients


def _like_add_mlp(x_ND: Tensor, up_FD: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    N = len(x_ND)
    return x_ND.new_empty(x_ND.shape), x_ND.new_empty(N), x_ND.new_empty(N, len(up_FD))


@operator("add_mlp", like=_like_add_mlp)
def _add_mlp(
    x_ND: Tensor, up_FD: Tensor, down_DF: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The stream after the MLP; and for the backward 1 / rms of x, and the hidden layer."""
    y_ND, r_N, h_NF = _like_add_mlp(x_ND, up_FD)
    sizes = len(x_ND), *reversed(up_FD.shape)
    native.run("mlp_forward", x_ND, up_FD, down_DF, eps, r_N, h_NF, y_ND, *sizes)
    return y_ND, r_N, h_NF


def _like_add_mlp_backward(
    _g: Tensor, x: Tensor, _r: Tensor, _h: Tensor, up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), up.new_empty(up.shape), down.new_empty(down.shape)


@operator("add_mlp_backward", like=_like_add_mlp_backward)
def _add_mlp_backward(
    g_ND: Tensor, x_ND: Tensor, r_N: Tensor, h_NF: Tensor, up_FD: Tensor, down_DF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    known = (g_ND, x_ND, r_N, h_NF, up_FD, down_DF)
    gradients = _like_add_mlp_backward(*known)
    native.run("mlp_backward", *known, *gradients, len(x_ND), *reversed(up_FD.shape))
    return gradients


def _like_head_loss(
    x_ND: Tensor, head_VD: Tensor, _targets: Tensor, _cap: float, with_gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (x_ND.shape, head_VD.shape) if with_gradients else ((0,), (0,))
    return x_ND.new_empty(()), x_ND.new_empty(shapes[0]), x_ND.new_empty(shapes[1])


@operator("head_loss", like=_like_head_loss)
def _head_loss(
    x_ND: Tensor, head_VD: Tensor, targets_N: Tensor, cap: float, with_gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss, and its gradients if they are asked for."""
    loss, dx, dhead = _like_head_loss(x_ND, head_VD, targets_N, cap, with_gradients)
    gradients = (dx, dhead) if with_gradients else (None, None)
    sizes = len(x_ND), *reversed(head_VD.shape)
    native.run("head_loss", x_ND, head_VD, targets_N, cap, loss, *gradients, *sizes)
    return loss, dx, dhead


def _like_token_losses(x_ND: Tensor, *_: object) -> Tensor:
    return x_ND.new_empty(len(x_ND))


@operator("token_losses", like=_like_token_losses)
def _token_losses(x_ND: Tensor, head_VD: Tensor, targets_N: Tensor, cap: float) -> Tensor:
    losses_N = _like_token_losses(x_ND)
    sizes = len(x_ND), *reversed(head_VD.shape)
    native.run("token_losses", x_ND, head_VD, targets_N, cap, losses_N, *sizes)
    return losses_N


def _keep_linear(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _keep_add_linear(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ARG001
    _, *kept, ctx.factor = inputs
    ctx.save_for_backward(*kept)


def _add_linear_gradients(ctx, g: Tensor):  # type: ignore[no-untyped-def]
    gradients = _linear_backward(g, *ctx.saved_tensors)
    if ctx.factor != 1:
        gradients = tuple(gradient * ctx.factor for gradient in gradients)
    return g, *gradients, None


def _keep_norm_qkv(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, *weights, cos_TK, sin_TK, _, _, _ = inputs
    q, k, v, r, rq, rk = output
    ctx.like_v = v.shape
    ctx.save_for_backward(q, k, rq, rk, x, r, *weights, cos_TK, sin_TK)
    ctx.set_materialize_grads(False)


def _norm_qkv_gradients(ctx, dq, dk, dv, *_):  # type: ignore[no-untyped-def]
    q, k, *rest = ctx.saved_tensors
    given = zip((dq, dk, dv), (q.shape, k.shape, ctx.like_v), strict=True)
    known = [q.new_zeros(shape) if g is None else g for g, shape in given]
    return *_norm_qkv_backward(*known, q, k, *rest), None, None, None, None, None  # type: ignore[call-arg]


def _keep_add_mlp(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)
    x_ND, up_FD, down_DF, _ = inputs
    ctx.save_for_backward(x_ND, *output[1:], up_FD, down_DF)


def _keep_head_loss(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ARG001
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


differentiate("linear", lambda ctx, g: _linear_backward(g, *ctx.saved_tensors), keep=_keep_linear)
differentiate("add_linear", _add_linear_gradients, keep=_keep_add_linear)
differentiate("norm_qkv", _norm_qkv_gradients, keep=_keep_norm_qkv)
differentiate(
    "add_mlp",
    lambda ctx, g, _r, _h: (*_add_mlp_backward(g, *ctx.saved_tensors), None),
    keep=_keep_add_mlp,
)
differentiate(
    "head_loss",
    lambda ctx, g, _dx, _dhead: (*(g * d for d in ctx.saved_tensors), None, None, None),
    keep=_keep_head_loss,
)
