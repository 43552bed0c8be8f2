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
from speedrun.optim.base import ParamBlock, Shape, SlotOptimizer
from speedrun.optim.options import documented


def adam_update(param: Tensor, state: Mapping[str, Tensor], options: Mapping[str, Any]) -> None:
    """One step of one parameter in fp32; only the last operation rounds to the parameter's type."""
    assert param.grad is not None
    beta1, beta2 = options["betas"]
    exp_avg, exp_avg_sq, step = (state[slot] for slot in ("exp_avg", "exp_avg_sq", "step"))
    grad = param.grad.float()
    step.add_(1)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = exp_avg_sq.div(1 - beta2**step).sqrt_().add_(options["eps"])
    update = exp_avg.div(1 - beta1**step).div_(denominator).mul_(options["lr"])
    kept = param.float().mul_(1 - options["lr"] * options["weight_decay"])
    param.copy_(kept.sub_(update))


def fused_adam_update(blocks: list[ParamBlock]) -> None:
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

    def update(self) -> None:
        fused: defaultdict[tuple[int, torch.device], list[ParamBlock]] = defaultdict(list)
        for block in self.blocks:
            param = block.param
            if param.grad is None:
                continue
            if param.dtype == torch.float32 and param.device.type in ("cpu", "cuda"):
                fused[id(block.group), param.device].append(block)
            else:
                adam_update(param, block.state, block.group)
        for blocks in fused.values():
            fused_adam_update(blocks)
