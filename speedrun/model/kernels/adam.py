"""Adam's step of a table of bf16 numbers on a GPU: one pass over the weights and the state.

As operations of torch it is fourteen passes. Of fp32 weights torch has a kernel of its own, which
`optim/adam.py` takes; that one rounds bf16 weights' moments to bf16, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speedrun.model.kernels import launch

BLOCK, WARPS = 1024, 4  # 8 numbers a thread: 16 bytes of weights and of gradients


def adam_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    corrections: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    good: Tensor | None = None,
) -> None:
    """Change weights and moments, all contiguous, or nothing where not `good`.

    `corrections` are 1 - beta^t of both moments, in fp32 on the device.
    """
    from speedrun.model.kernels.adam_kernel import adam

    for one in (grad, exp_avg, exp_avg_sq):
        assert one.shape == param.shape
        assert one.is_contiguous()
    assert param.is_contiguous()
    known = corrections if good is None else good.view(torch.uint8)  # without, it is not read
    tensors = (param, grad, exp_avg, exp_avg_sq, corrections, known)
    numbers = (param.numel(), lr, 1 - lr * weight_decay, 1 - betas[0], betas[1], 1 - betas[1], eps)
    grid = (-(-param.numel() // BLOCK),)
    settings = {"GUARDED": good is not None, "BLOCK": BLOCK, "num_warps": WARPS}
    launch.start(adam, grid, *tensors, *numbers, **settings)
