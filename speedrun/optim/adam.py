"""Adam with decoupled weight decay, for everything that is not a hidden matrix.

The state is fp32 whatever the parameter's type and exists from the start. fp32 parameters on a CPU
or CUDA device go through torch's fused kernel, one pass over memory; the rest, bf16 tables above
all, through the same formula in fp32.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from speedrun.config.optimizer import AdamOptions
from speedrun.optim.base import ParamBlock, Shape, SlotOptimizer, where
from speedrun.optim.options import documented


def adam_update(
    param: Tensor,
    state: Mapping[str, Tensor],
    options: Mapping[str, Any],
    good: Tensor | None = None,
) -> None:
    """One step of one parameter in fp32; only the last operation rounds to the parameter's type.

    Where not `good` the gradient is 0, the moments keep all of themselves, and so does the weight.
    """
    assert param.grad is not None
    beta1, beta2 = options["betas"]
    exp_avg, exp_avg_sq, step = (state[slot] for slot in ("exp_avg", "exp_avg_sq", "step"))
    grad = param.grad.float()
    if good is not None:
        grad = grad.where(good, 0.0)
    step.add_(where(good, 1.0, 0.0))
    exp_avg.lerp_(grad, where(good, 1 - beta1, 0.0))
    exp_avg_sq.mul_(where(good, beta2, 1.0)).addcmul_(grad, grad, value=1 - beta2)
    denominator = exp_avg_sq.div(1 - beta2**step).sqrt_().add_(options["eps"])
    update = exp_avg.div(1 - beta1**step).div_(denominator).mul_(options["lr"])
    new = param.float().mul_(1 - options["lr"] * options["weight_decay"]).sub_(update)
    # Before the first step the corrections divide 0 by 0, so no factor could stand here.
    param.copy_(new if good is None else new.where(good, param.float()))


def fused_adam_update(blocks: list[ParamBlock], good: Tensor | None = None) -> None:
    """`adam_update` of many fp32 parameters of one group and device, in torch's kernel."""
    options = blocks[0].group
    beta1, beta2 = options["betas"]
    adamw(
        [block.param for block in blocks],
        [block.param.grad for block in blocks if block.param.grad is not None],
        [block.state["exp_avg"] for block in blocks],
        [block.state["exp_avg_sq"] for block in blocks],
        [],
        [block.state["step"] for block in blocks],
        fused=True,
        # What torch's scaling of fp16 gradients uses to leave a step out, without asking for it.
        found_inf=None if good is None else good.logical_not().float(),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=options["lr"],
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=False,
    )


@documented
class Adam(SlotOptimizer):
    """AdamW (plain Adam at weight_decay=0) for tensors, (name, tensor) pairs or param groups.

    Every option can be set per param group. `process_group` and `check_finite` are those of Muon,
    but every rank holds all state and makes all updates.
    """

    options = AdamOptions

    def slots(self, shape: Shape, options: Mapping[str, Any]) -> dict[str, Shape]:  # noqa: ARG002
        return {"exp_avg": shape, "exp_avg_sq": shape, "step": ()}

    def update(self, good: Tensor | None = None) -> None:
        fused: defaultdict[tuple[int, torch.device], list[ParamBlock]] = defaultdict(list)
        for block in self.blocks:
            param = block.param
            if param.grad is None:
                continue
            if param.dtype == torch.float32 and param.device.type in ("cpu", "cuda"):
                fused[id(block.group), param.device].append(block)
            else:
                adam_update(param, block.state, block.group, good)
        for blocks in fused.values():
            fused_adam_update(blocks, good)
