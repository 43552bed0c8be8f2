"""The check that keeps a NaN out of the optimizer: before anything is touched, all or nothing."""

from collections.abc import Iterable

import torch
from torch import Tensor

from speedrun.optim.errors import OptimError


class NonFiniteGradientError(OptimError, ArithmeticError):
    """A gradient holds a NaN or an infinity; no parameter and no state has been changed."""


@torch.no_grad()
def refuse_non_finite(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if any gradient is not finite. One pass over the gradients, one wait for the device.

    Ranks that hold the same averaged gradients come to the same verdict without talking.
    """
    grads = [(name, tensor.grad) for name, tensor in named if tensor.grad is not None]
    if not grads:
        return
    for name, grad in grads:
        if grad.is_sparse:
            raise OptimError(
                f"the gradient of {name} is sparse; build its module with sparse=False"
            )
    # A NaN or an infinity never leaves a finite sum. A sum may also overflow (entries near 1e38);
    # then the entries themselves decide, which on a CPU takes 50 times as long.
    device = grads[0][1].device
    sums = torch.stack([grad.sum().to(device, torch.float32) for _, grad in grads])
    if sums.isfinite().all():
        return
    bad = [name for name, grad in grads if not grad.isfinite().all()]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise NonFiniteGradientError(
            f"the gradient of {bad[0]}{more} holds a NaN or an infinity; nothing was updated, "
            f"so skip this step or lower the learning rate and go back to a checkpoint"
        )
