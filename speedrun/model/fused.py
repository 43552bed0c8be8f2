"""The elementwise parts of the model: norms, rotation, ReLU squared, the softcap.

Each function states its formula in torch; that code runs on GPUs, in bf16 and wherever there is no
C++ compiler. On a CPU in fp32 a native routine computes the same in one pass over memory
(native/fused.cpp), where torch takes one pass per operation. The routines are torch operators with
their own backward, so a compiled model stays one graph.

Shapes: B batch, T time, H heads, G key/value heads, K head dim.
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


def blend(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a x + b y with learnt 0-d weights, which being 0-d leave the type of x and y as it is."""
    if native_for(x) and native_for(y):
        return _blend(x, y, a, b)
    return a * x + b * y


def offset_keys(k_BTGK: Tensor, starts_BT: Tensor) -> Tensor:
    """The second and the last quarter of each key from the token before it in its document.

    At the tokens that `starts` marks, which have none before, the key is left as it is.
    """
    if native_for(k_BTGK) and k_BTGK.size(-1) % 4 == 0:
        return _offset_keys(k_BTGK, starts_BT.to(torch.float32))
    return with_previous(k_BTGK, torch.cat([k_BTGK[:, :1], k_BTGK[:, :-1]], dim=1), starts_BT)


def with_previous(k_BTGK: Tensor, previous_BTGK: Tensor, starts_BT: Tensor) -> Tensor:
    """`offset_keys` of keys whose previous ones are given."""
    previous_BTGK = torch.where(starts_BT[:, :, None, None], k_BTGK, previous_BTGK)
    own, previous = k_BTGK.chunk(4, dim=-1), previous_BTGK.chunk(4, dim=-1)
    return torch.cat([own[0], previous[1], own[2], previous[3]], dim=-1)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap): slope 1 at 0, values within +-cap. A cap of 0 means none."""
    return cap * torch.tanh(x / cap) if cap else x


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


@operator("blend", like=lambda x, _y, _a, _b: x.new_empty(x.shape))
def _blend(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    z = x.new_empty(x.shape)
    native.run("blend_forward", x, y, a, b, z, x.numel())
    return z


def _like_blend_backward(
    _g: Tensor, x: Tensor, y: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tuple(t.new_empty(t.shape) for t in (x, y, a, b))  # type: ignore[return-value]


@operator("blend_backward", like=_like_blend_backward)
def _blend_backward(
    g: Tensor, x: Tensor, y: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gradients = _like_blend_backward(g, x, y, a, b)
    native.run("blend_backward", g, x, y, a, b, *gradients, x.numel())
    return gradients


@operator("offset_keys", like=lambda k, _starts: k.new_empty(k.shape))
def _offset_keys(k_BTGK: Tensor, starts_BT: Tensor) -> Tensor:
    return _offset("offset_keys_forward", k_BTGK, starts_BT)


@operator("offset_keys_backward", like=lambda g, _starts: g.new_empty(g.shape))
def _offset_keys_backward(g_BTGK: Tensor, starts_BT: Tensor) -> Tensor:
    return _offset("offset_keys_backward", g_BTGK, starts_BT)


def _offset(routine: str, x_BTGK: Tensor, starts_BT: Tensor) -> Tensor:
    B, T, G, K = x_BTGK.shape
    y_BTGK = x_BTGK.new_empty(x_BTGK.shape)
    native.run(routine, x_BTGK, starts_BT, y_BTGK, B * T, T, G, K)
    return y_BTGK


def _keep_norm_rotate(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, cos_TK, sin_TK, _ = inputs
    ctx.save_for_backward(*output, cos_TK, sin_TK)


def _keep_inputs(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _keep_output(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ARG001
    ctx.save_for_backward(output)


differentiate(
    "norm_rotate",
    lambda ctx, g, _: (_norm_rotate_backward(g, *ctx.saved_tensors), None, None, None),
    keep=_keep_norm_rotate,
)


def _keep_starts(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ARG001
    ctx.save_for_backward(inputs[1])


differentiate(
    "offset_keys",
    lambda ctx, g: (_offset_keys_backward(g, *ctx.saved_tensors), None),
    keep=_keep_starts,
)
differentiate(
    "blend",
    lambda ctx, g: _blend_backward(g, *ctx.saved_tensors),
    keep=_keep_inputs,
)
differentiate(
    "relu_squared",
    lambda ctx, g: _relu_squared_backward(g, *ctx.saved_tensors),
    keep=_keep_output,
)
