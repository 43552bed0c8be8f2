"""The MLP on a GPU: products whose last act, while sums are in registers, is the ReLU squared.

    y = h V^T,   h = relu(x U^T)^2              forward: a kernel makes h, torch multiplies by V
    dz = 2 sqrt(h) (g V)                        backward: the same kernel with another last act
    dx = dz U,   dU = dz^T x,   dV = g^T h      torch's products

What is kept for the backward pass is h alone, not z = x U^T beside it: dV needs h, and where z > 0
it is sqrt(h), so nothing is computed again but a root. From an h in bf16 that is known to half of
what a z in bf16 is. Without the kernels z and dh each go to memory and back, 0.4 GB each way in
every layer of record 18.

Weights are used in the type of x, and cast again in the backward, which is cheaper than keeping
the copies of all layers.

Shapes: N tokens, D width, F hidden width.
"""

from __future__ import annotations

from torch import Tensor

from speedrun.model.kernels import launch
from speedrun.model.native.operators import differentiate, operator

# Rows, columns and depth of a tile, warps, and tiles that are on their way to shared memory; from
# that capability on. On an H100 two blocks of threads share a multiprocessor, so that one of them
# multiplies while the other stores; tiles of 256 columns spill there at odd numbers of tokens.
Tiles = tuple[int, int, int, int, int]
TILES: dict[int, Tiles] = {8: (128, 128, 32, 8, 4), 9: (128, 128, 64, 8, 3)}
# Where rows do not all begin at 16 bytes, numbers are loaded one by one, with an address for each:
# larger tiles spill by kilobytes. The tiles of the interpreter too, whose numbers may be fp32.
SMALL: Tiles = (32, 64, 32, 4, 2)


def mlp(x_ND: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
    """relu(x U^T)^2 V^T in the type of x."""
    return _mlp(x_ND, up_FD, down_DF)[0]


def _like_mlp(x_ND: Tensor, up_FD: Tensor, down_DF: Tensor) -> tuple[Tensor, Tensor]:
    N = len(x_ND)
    return x_ND.new_empty(N, len(down_DF)), x_ND.new_empty(N, len(up_FD))


@operator("triton_mlp", like=_like_mlp)
def _mlp(x_ND: Tensor, up_FD: Tensor, down_DF: Tensor) -> tuple[Tensor, Tensor]:
    """y, and h for the backward."""
    up_FD, down_DF = up_FD.to(x_ND.dtype), down_DF.to(x_ND.dtype)
    h_NF = hidden(x_ND, up_FD)
    return h_NF @ down_DF.mT, h_NF


def _like_mlp_backward(
    _g: Tensor, x: Tensor, _h: Tensor, up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), up.new_empty(up.shape), down.new_empty(down.shape)


@operator("triton_mlp_backward", like=_like_mlp_backward)
def _mlp_backward(
    g_ND: Tensor, x_ND: Tensor, h_NF: Tensor, up_FD: Tensor, down_DF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dz_NF = hidden_gradient(g_ND, down_DF.to(g_ND.dtype), h_NF)
    dup_FD, ddown_DF = dz_NF.mT @ x_ND, g_ND.mT @ h_NF
    dx_ND = dz_NF @ up_FD.to(dz_NF.dtype)
    return dx_ND, dup_FD.to(up_FD.dtype), ddown_DF.to(down_DF.dtype)


def hidden(x_ND: Tensor, up_FD: Tensor) -> Tensor:
    """relu(x U^T)^2."""
    h_NF = x_ND.new_empty(len(x_ND), len(up_FD))
    _product(x_ND.contiguous(), up_FD.contiguous(), None, h_NF)
    return h_NF


def hidden_gradient(g_ND: Tensor, down_DF: Tensor, h_NF: Tensor) -> Tensor:
    """The gradient before the ReLU squared, 2 sqrt(h) (g V)."""
    dz_NF = h_NF.new_empty(h_NF.shape)
    _product(g_ND.contiguous(), down_DF.contiguous().mT, h_NF.contiguous(), dz_NF)
    return dz_NF


def tiles(major: int, N: int, K: int) -> Tiles:
    """For a product with N columns that sums up K numbers, on a chip of that major capability."""
    whole = N % 16 == 0 and K % 16 == 0
    return TILES[min(major, max(TILES))] if major and whole else SMALL


def _product(a_MK: Tensor, b_NK: Tensor, h_MN: Tensor | None, out_MN: Tensor) -> None:
    from speedrun.model.kernels.mlp_kernel import product

    (M, K), N = a_MK.shape, len(b_NK)
    rows, columns, depth, warps, stages = tiles(launch.capability(a_MK)[0], N, K)
    grid = (-(-M // rows) * -(-N // columns),)
    launch.start(
        product, grid, a_MK, b_NK, h_MN, out_MN, M, N, K, *b_NK.stride(),
        BACKWARD=h_MN is not None, WIDEN=a_MK.device.type == "cpu",
        ROWS=rows, COLUMNS=columns, DEPTH=depth, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)
    x_ND, up_FD, down_DF = inputs
    ctx.save_for_backward(x_ND, output[1], up_FD, down_DF)


differentiate("triton_mlp", lambda ctx, g, _h: _mlp_backward(g, *ctx.saved_tensors), keep=_keep)
