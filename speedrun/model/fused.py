"""The elementwise parts of the model: norms, rotation, ReLU squared, the loss.

Each function states its formula in torch; that code runs on GPUs, in bf16 and wherever there is no
C++ compiler. On a CPU in fp32 a native routine computes the same in one pass over memory
(native/fused.cpp), where torch takes one pass per operation: of a nano step's 1,730 ms on one
thread these parts take 420 in torch and 120 natively. The routines are torch operators with their
own backward, so a compiled model stays one graph.

Shapes: B batch, T time, H heads, K head dim, V vocabulary, N tokens of the whole batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from speedrun.model import native
from speedrun.model.native.operators import differentiate, operator


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """RMSNorm without gain. eps is explicit: PyTorch changed its default for bf16 in 2025."""
    if native_for(x):
        return _norm_rotate(x.reshape(1, -1, 1, x.size(-1)), None, None, eps)[0].view_as(x)
    return F.rms_norm(x, (x.size(-1),), eps=eps)


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor, eps: float | None) -> Tensor:
    """The pairs (i, i + K/2) rotated by the angles of their position; with eps, normed first."""
    if native_for(x_BHTK):
        return _norm_rotate(x_BHTK.transpose(1, 2), cos_TK, sin_TK, eps)[0].transpose(1, 2)
    x = x_BHTK if eps is None else rms_norm(x_BHTK, eps)
    x1, x2 = x.float().chunk(2, dim=-1)
    rotated = torch.cat([x1 * cos_TK + x2 * sin_TK, x2 * cos_TK - x1 * sin_TK], dim=-1)
    return rotated.type_as(x_BHTK)


def relu_squared(x: Tensor) -> Tensor:
    return _relu_squared(x) if native_for(x) else F.relu(x).square()


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap): slope 1 at 0, values within +-cap. A cap of 0 means none."""
    return cap * torch.tanh(x / cap) if cap else x


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor, cap: float) -> Tensor:
    """Mean loss in nats per token of softcapped logits, the softmax in fp32; all targets count."""
    logits_NV, targets_N = logits_BTV.flatten(0, 1), targets_BT.flatten()
    if native_for(logits_BTV):
        return _cross_entropy(logits_NV, targets_N, cap)[0]
    return F.cross_entropy(softcap(logits_NV, cap).float(), targets_N)


def native_for(x: Tensor) -> bool:
    """Whether the native routines can compute on x; builds them at the first call."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and _available()


def _available() -> bool:
    return not isinstance(native.load(), str)


# What torch.compiler.assume_constant_result does; calling that would import torch's compiler, 1.1 s
# in every run. Without the mark a compiled model would trace into the loading and break its graph.
_available._dynamo_marked_constant = True  # type: ignore[attr-defined]


# Below: the native routines as operators, and the registration of their gradients.


def _like_norm_rotate(
    x: Tensor, _cos: Tensor | None, _sin: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((0,) if eps is None else x.shape[:-1])


@operator("norm_rotate", like=_like_norm_rotate)
def _norm_rotate(
    x_BTHK: Tensor, cos_TK: Tensor | None, sin_TK: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """x normed (if there is an eps), then rotated (if there are angles); and 1 / rms of x."""
    B, T, H, K = x_BTHK.shape
    if cos_TK is not None and cos_TK.shape != (T, K // 2):
        raise ValueError(f"there are angles for {len(cos_TK)} tokens, but the row has {T}")
    y, r = _like_norm_rotate(x_BTHK, cos_TK, sin_TK, eps)
    kept = None if eps is None else r
    native.run("norm_rotate_forward", x_BTHK, cos_TK, sin_TK, eps or 0.0, y, kept, B * T, T, H, K)
    return y, r


def _like_second(_g: Tensor, x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


@operator("norm_rotate_backward", like=_like_second)
def _norm_rotate_backward(
    g: Tensor, y: Tensor, r: Tensor, cos_TK: Tensor | None, sin_TK: Tensor | None
) -> Tensor:
    B, T, H, K = y.shape
    dx, kept = y.new_empty(y.shape), r if r.numel() else None
    native.run("norm_rotate_backward", g, y, kept, cos_TK, sin_TK, dx, B * T, T, H, K)
    return dx


@operator("relu_squared", like=lambda x: x.new_empty(x.shape))
def _relu_squared(x: Tensor) -> Tensor:
    y = x.new_empty(x.shape)
    native.run("relu_squared_forward", x, y, x.numel())
    return y


@operator("relu_squared_backward", like=_like_second)
def _relu_squared_backward(g: Tensor, y: Tensor) -> Tensor:
    dx = y.new_empty(y.shape)
    native.run("relu_squared_backward", g, y, dx, y.numel())
    return dx


def _like_cross_entropy(logits_NV: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return logits_NV.new_empty(()), logits_NV.new_empty(logits_NV.size(0), 2)


@operator("cross_entropy", like=_like_cross_entropy)
def _cross_entropy(logits_NV: Tensor, targets_N: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """The mean loss, and for the backward each row's largest logit and its sum of e^(z - that)."""
    loss, rows_N2 = _like_cross_entropy(logits_NV, targets_N, cap)
    native.run("cross_entropy_forward", logits_NV, targets_N, cap, loss, rows_N2, *logits_NV.shape)
    return loss, rows_N2


@operator("cross_entropy_backward", like=_like_second)
def _cross_entropy_backward(
    g: Tensor, logits_NV: Tensor, targets_N: Tensor, rows_N2: Tensor, cap: float
) -> Tensor:
    dlogits_NV = logits_NV.new_empty(logits_NV.shape)
    shape = logits_NV.shape
    native.run("cross_entropy_backward", g, logits_NV, targets_N, cap, rows_N2, dlogits_NV, *shape)
    return dlogits_NV


def _keep_norm_rotate(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, cos_TK, sin_TK, _ = inputs
    ctx.save_for_backward(*output, cos_TK, sin_TK)


def _keep_output(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ARG001
    ctx.save_for_backward(output)


def _keep_cross_entropy(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    logits_NV, targets_N, ctx.cap = inputs
    ctx.save_for_backward(logits_NV, targets_N, output[1])


differentiate(
    "norm_rotate",
    lambda ctx, g, _: (_norm_rotate_backward(g, *ctx.saved_tensors), None, None, None),
    keep=_keep_norm_rotate,
)
differentiate(
    "relu_squared",
    lambda ctx, g: _relu_squared_backward(g, *ctx.saved_tensors),
    keep=_keep_output,
)
differentiate(
    "cross_entropy",
    lambda ctx, g, _: (_cross_entropy_backward(g, *ctx.saved_tensors, ctx.cap), None, None),  # type: ignore[call-arg]
    keep=_keep_cross_entropy,
)
