"""Head and loss on a GPU: one pass over the logits makes the loss and their gradient, in place.

    loss = 1/n sum_i sum_k w_k (logsumexp_i - z_i[target_ki])       z = cap tanh(x W^T / cap)

over tokens i and the targets that each has: the next token, and with further rows of targets
those behind it. A negative target does not count; n is the number of tokens that have a next one.

As on a CPU (native/loss.cpp) the gradients are taken along with the loss, while the logits are
there, and a backward pass only multiplies them by its own gradient. Nobody else ever sees the
logits, so the kernel writes their gradient over them whatever autograd or a compiler may think of
it, and they are gone when the function returns: the passes through the blocks find their memory
free. A backward that were an operator of its own would be handed a copy of them by the compiler,
6.6 GB at 65,536 tokens of 50,304 logits.

Shapes: N tokens, D width, V vocabulary, K targets a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speedrun.model.kernels import launch
from speedrun.model.native.operators import differentiate, operator

# A row's piece that is in registers at once, 16 numbers a thread. So many threads a row that at
# most three rows are under way on a multiprocessor: smaller groups would have more of them there
# than the L2 cache holds, which is to have a row when it is read again. Twice as many spill.
BLOCK, WARPS = 8192, 16
ALIGNED = 64  # logits between the beginnings of rows, a multiple: all threads then load 16 bytes


def head_loss(
    x_ND: Tensor, head_VD: Tensor, targets_KN: Tensor, weights_K: Tensor, cap: float
) -> Tensor:
    """The loss above, of logits in the type of x; the softmax in fp32.

    Where no target counts it is NaN, as the mean of nothing is. A target outside of the vocabulary
    makes it NaN too: to refuse it, a GPU would have to be waited for.
    """
    learns = x_ND.requires_grad or head_VD.requires_grad
    with_gradients = torch.is_grad_enabled() and learns
    return _head_loss(x_ND, head_VD, targets_KN, weights_K, cap, with_gradients)[0]


def _like_head_loss(
    x_ND: Tensor, head_VD: Tensor, _t: Tensor, _w: Tensor, _cap: float, with_gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (x_ND.shape, head_VD.shape) if with_gradients else ((0,), (0,))
    loss = x_ND.new_empty((), dtype=torch.float32)
    return loss, x_ND.new_empty(shapes[0]), x_ND.new_empty(shapes[1])


@operator("triton_head_loss", like=_like_head_loss)
def _head_loss(
    x_ND: Tensor,
    head_VD: Tensor,
    targets_KN: Tensor,
    weights_K: Tensor,
    cap: float,
    with_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and its gradients in the type of x if they are asked for."""
    head_VD = head_VD.to(x_ND.dtype)
    logits_NV = rows(x_ND, len(x_ND), len(head_VD))
    torch.mm(x_ND, head_VD.mT, out=logits_NV)
    count = (targets_KN[0] >= 0).sum()
    losses_N = losses_in_place(logits_NV, targets_KN, weights_K, cap, count, with_gradients)
    loss = losses_N.sum() / count
    if not with_gradients:
        return loss, x_ND.new_empty(0), x_ND.new_empty(0)
    return loss, logits_NV @ head_VD, logits_NV.mT @ x_ND


def rows(like: Tensor, N: int, V: int) -> Tensor:
    """(N, V), every row beginning at a multiple of ALIGNED numbers."""
    wide = -(-V // ALIGNED) * ALIGNED
    return like.new_empty(N, wide)[:, :V]


def losses_in_place(
    logits_NV: Tensor,
    targets_KN: Tensor,
    weights_K: Tensor,
    cap: float,
    count: Tensor,
    with_gradients: bool,
) -> Tensor:
    """Each token's loss, (N,) in fp32; the logits become the gradient of their sum / count."""
    from speedrun.model.kernels.loss_kernel import softcap_cross_entropy

    (N, V), K = logits_NV.shape, len(weights_K)
    assert logits_NV.stride(1) == 1
    assert targets_KN.shape == (K, N)
    losses_N = logits_NV.new_empty(N, dtype=torch.float32)
    arguments = (logits_NV, targets_KN.contiguous(), weights_K, count, losses_N)
    sizes = (N, V, logits_NV.stride(0), float(cap))
    settings = {"K": K, "CAPPED": cap != 0, "GRADIENT": with_gradients, "BLOCK": BLOCK}
    launch.start(softcap_cross_entropy, (N,), *arguments, *sizes, **settings, num_warps=WARPS)
    return losses_N


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)
    ctx.dtype = inputs[1].dtype
    ctx.save_for_backward(*output[1:])


def _gradients(ctx, g, _dx, _dhead):  # type: ignore[no-untyped-def]
    dx_ND, dhead_VD = ctx.saved_tensors
    return (dx_ND * g).to(dx_ND.dtype), dhead_VD.to(ctx.dtype) * g, None, None, None, None


differentiate("triton_head_loss", _gradients, keep=_keep)
