"""Adam with decoupled weight decay, for everything that is not a hidden matrix.

The state is fp32 whatever the parameter's type and exists from the start. fp32 parameters on a CPU
or CUDA device go through torch's fused kernel, one pass over memory; the rest, bf16 tables above
all, through the same formula in fp32, on a GPU in a kernel of ours.

With a process group a large table is shared out: each rank has the state of some neighbouring rows,
updates these alone and sends them to the others while something else is computed. Whatever is small
is done on every rank, which is faster than to send it. Gradients must already be averaged, of a
shared table at least those of a rank's own rows (`ParamBlock.shard`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from speedrun.config.optimizer import AdamOptions
from speedrun.model import kernels
from speedrun.model.kernels.adam import adam_step
from speedrun.optim.base import ParamBlock, Shape, SlotOptimizer, where
from speedrun.optim.buckets import all_gather
from speedrun.optim.layout import Block, Rows, Whole
from speedrun.optim.options import documented

SHARED_NUMEL = 2**14  # from here on a table's rows are shared out


def adam_update(
    param: Tensor,
    state: Mapping[str, Tensor],
    options: Mapping[str, Any],
    good: Tensor | None = None,
) -> None:
    """One step of one parameter in fp32; only the last operation rounds to the parameter's type.

    On a GPU a kernel does it in one pass.

    Where not `good` the gradient is 0, the moments keep all of themselves, and so does the weight.
    """
    assert param.grad is not None
    beta1, beta2 = options["betas"]
    exp_avg, exp_avg_sq, step = (state[slot] for slot in ("exp_avg", "exp_avg_sq", "step"))
    step.add_(where(good, 1.0, 0.0))
    if kernels.on(param) and param.is_contiguous():
        corrections = torch.stack((1 - beta1**step, 1 - beta2**step))
        numbers = {name: options[name] for name in ("lr", "betas", "eps", "weight_decay")}
        adam_step(param, param.grad, exp_avg, exp_avg_sq, corrections, good=good, **numbers)
        return
    grad = param.grad.float()
    if good is not None:
        grad = grad.where(good, 0.0)
    exp_avg.lerp_(grad, where(good, 1 - beta1, 0.0))
    exp_avg_sq.mul_(where(good, beta2, 1.0)).addcmul_(grad, grad, value=1 - beta2)
    denominator = exp_avg_sq.div(1 - beta2**step).sqrt_().add_(options["eps"])
    update = exp_avg.div(1 - beta1**step).div_(denominator).mul_(options["lr"])
    new = param.float().mul_(1 - options["lr"] * options["weight_decay"]).sub_(update)
    # Before the first step the corrections divide 0 by 0, so no factor could stand here.
    param.copy_(new if good is None else new.where(good, param.float()))


def fused_adam_update(
    params: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    options: Mapping[str, Any],
    good: Tensor | None = None,
) -> None:
    """`adam_update` of many fp32 parameters of one group and device, in torch's kernel."""
    beta1, beta2 = options["betas"]
    adamw(
        [*params],
        [param.grad for param in params if param.grad is not None],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
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

    Every option can be set per param group. `process_group` and `check_finite` are those of Muon.
    """

    options = AdamOptions

    def __init__(self, params: ParamsT, lr: float | None = None, **options: Any) -> None:
        self._gathering: list[_Gathering] = []
        super().__init__(params, lr, **options)

    def slots(self, block: Block, options: Mapping[str, Any]) -> dict[str, Shape]:  # noqa: ARG002
        moments = {"exp_avg": block.shape, "exp_avg_sq": block.shape}
        if isinstance(block, Rows):
            return moments
        shared = isinstance(block, Whole) and block.parts > 1
        return {"step": ()} if shared else {**moments, "step": ()}

    def read_blocks(self, param: Tensor, name: str, options: Mapping[str, Any]) -> Sequence[Block]:
        [whole] = super().read_blocks(param, name, options)
        shape = whole.shape
        if self.world == 1 or param.numel() < SHARED_NUMEL or not param.is_contiguous():
            return [whole]
        most = -(-shape[0] // self.world)
        starts = range(0, shape[0], most)
        if len(starts) < self.world:  # some rank would have none
            return [whole]
        rows = [Rows(at, (min(most, shape[0] - at), *shape[1:])) for at in starts]
        return [Whole(shape, parts=self.world), *rows]

    def allocate(self, blocks: list[ParamBlock]) -> None:
        """A table's count of steps is everywhere, its moments where its rows are."""
        rank, steps = 0, {}
        for block in blocks:
            if not isinstance(block.block, Rows):
                super().allocate([block])
                rank, steps = 0, {"step": block.state["step"]}
                continue
            block.owner = rank
            if rank == self.rank:
                super().allocate([block])
                block.state |= steps
            rank += 1

    def shares(self) -> list[list[ParamBlock]]:
        by_parameter = self._by_parameter()
        owned = ([one for one in blocks if one.owner is not None] for blocks in by_parameter)
        return [blocks for blocks in owned if blocks]

    def update(self, good: Tensor | None = None) -> None:
        fused: defaultdict[tuple[int, torch.device], list[tuple[Tensor, ParamBlock]]]
        fused = defaultdict(list)
        for block in self.blocks:
            param, grad = block.param, block.gradient()
            if grad is None or "exp_avg" not in block.state:
                continue
            part = block.block.as_tiles(param.detach())
            part.grad = grad
            if param.dtype == torch.float32 and param.device.type in ("cpu", "cuda"):
                fused[id(block.group), param.device].append((part, block))
            else:
                adam_update(part, block.state, block.group, good)
        for pairs in fused.values():
            parts, blocks = zip(*pairs, strict=True)
            fused_adam_update(parts, [block.state for block in blocks], blocks[0].group, good)
        for block in self.blocks:
            if block.owner == self.rank and block.param.grad is not None:
                self._gathering.append(self._send(block))

    def _send(self, block: ParamBlock) -> "_Gathering":
        """Start to give the others this rank's rows, and to take theirs."""
        param, own = block.param.detach(), block.block.as_tiles(block.param.detach())
        most = -(-len(param) // self.world)
        whole = len(param) == most * self.world
        received = param if whole else param.new_empty(most * self.world, *param.shape[1:])
        sent = own.new_zeros(most, *own.shape[1:])
        sent[: len(own)] = own
        return _Gathering(all_gather(received, sent, self._process_group), received, param)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._gathering = []

    def finish(self) -> None:
        for work, received, param in self._gathering:
            work.wait()
            if received is not param:
                param.copy_(received[: len(param)])
        self._gathering.clear()


class _Gathering(NamedTuple):
    """Rows of a table on their way."""

    work: dist.Work
    received: Tensor
    param: Tensor
