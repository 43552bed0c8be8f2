"""Gradients between the backward and the update: summed over ranks, measured, held to a norm.

One rank has all of them in `param.grad`. Of several, each needs those of the weights that it
updates: its own matrices of Muon's and its own rows of large tables. So that is what it is sent
(`SharedGradients`), half of what an all-reduce sends. `machine.share_gradients=false` has every
rank get all gradients averaged, as DistributedDataParallel does by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from speedrun.config.schema import MachineConfig
from speedrun.model.planned import Planned
from speedrun.optim.base import ParamBlock
from speedrun.optim.combined import CombinedOptimizer
from speedrun.train.scatter import Scatter

SMALL_BUCKETS = 1  # MB of gradients sent at once in a rehearsal, so that a toy has several, too
SELDOM = 1_000_000_000  # steps


def over_ranks(
    passes: Planned, optimizer: CombinedOptimizer, machine: MachineConfig
) -> tuple[DistributedDataParallel, Gradients]:
    """The model as one whose gradients are sent in its backward, and where they are then.

    Our buffers are not sent at each step: they are the angles of the positions, which never change.
    Those of users' own code may, and a checkpoint has the first rank's. Such code may leave a
    parameter aside on one rank, as where no token of its rows goes to an expert.
    """
    model = passes.model
    newer = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    own = tuple(f"{place}." for place in model.custom)
    changing = any(name.startswith(own) for name, _ in model.named_buffers())
    quiet: dict[str, Any] = {"forward_sync_buffers" if newer else "broadcast_buffers": changing}
    parallel = DistributedDataParallel(
        passes,
        gradient_as_bucket_view=machine.bucket_views,
        bucket_cap_mb=SMALL_BUCKETS if machine.rehearsal else None,
        find_unused_parameters=not model.blocks_are_ours,
        **quiet,
    )
    # Its own statistics wait for the device, every hundredth step unless told otherwise.
    quieten: Any = parallel._set_ddp_runtime_logging_sample_rate
    quieten(SELDOM)
    if machine.share_gradients:
        return parallel, SharedGradients(parallel, optimizer)
    return parallel, Gradients(parallel)


class Gradients:
    """All of them are in `param.grad`, of one rank or averaged over ranks."""

    split = False  # over the ranks
    divisor = 1  # of a loss, so that the sum over ranks is their mean

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [*model.parameters()]

    def arrive(self) -> None:
        """Wait until they are there; a GPU's stream waits, not who calls this."""

    def parts(self) -> list[Tensor]:
        """Those that this rank's update is made from."""
        return [p.grad for p in self._parameters if p.grad is not None]

    def counted(self) -> list[Tensor]:
        """Those that this rank counts in the norm: each is counted on one, if they are `split`."""
        return self.parts()

    def norm(self) -> Tensor:
        """Of what this rank counts."""
        found = self.counted()
        if not found:
            return torch.zeros((), device=self._parameters[0].device)
        norms: Sequence[Tensor] = torch._foreach_norm(found)
        whole: Tensor = torch.stack([norm.float() for norm in norms]).norm()
        return whole

    def clip(self, norm: float | Tensor, limit: float) -> None:
        """Scale them down to `limit` from the given norm, if there is a limit (0: none)."""
        if not limit or (isinstance(norm, float) and norm <= limit):
            return
        gradients = self.parts()
        if isinstance(norm, float):
            torch._foreach_mul_(gradients, limit / norm)
            return
        factor = (limit / norm).clamp(max=1.0).float()
        torch._foreach_mul_([g for g in gradients if g.dtype == factor.dtype], factor)
        for gradient in gradients:
            if gradient.dtype != factor.dtype:  # in which the factor would be rounded
                gradient.copy_(gradient.float() * factor)


class SharedGradients(Gradients):
    """Each rank has those of what it updates; what every rank updates is averaged everywhere.

    DDP says when a gradient is there, in an order that all ranks share, and makes a graph of a
    compiled model end where gradients can be sent. It sends nothing itself, so what it leaves in
    `param.grad` is this rank's own where ranks share the parameter out.
    """

    split = True

    def __init__(self, parallel: DistributedDataParallel, optimizer: CombinedOptimizer) -> None:
        super().__init__(parallel)
        self.divisor = dist.get_world_size()
        self._first = dist.get_rank() == 0
        self._scatters = [Scatter(blocks) for blocks in map(_trained, optimizer.shares()) if blocks]
        # Several of a parameter that is cut into blocks of unlike shapes.
        self._scatters_of: dict[Tensor, list[Scatter]] = {}
        for scatter in self._scatters:
            for param in scatter.params:
                self._scatters_of.setdefault(param, []).append(scatter)
        self._everywhere: list[tuple[list[Tensor], Tensor, dist.Work]] = []
        parallel.register_comm_hook(None, self._send)

    def _send(self, _: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Called in the backward, as soon as the gradients of a bucket of DDP's are there."""
        others = []
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            for scatter in self._scatters_of.get(param, ()):
                scatter.add(param, grad)
            if param not in self._scatters_of:
                others.append((param, grad))
        if others:
            params, grads = zip(*others, strict=True)
            flat = torch.cat([grad.flatten() for grad in grads])
            work = dist.all_reduce(flat, async_op=True)
            assert work is not None
            self._everywhere.append(([*params], flat, work))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    # DDP compares the annotations of what it calls with its own classes, and these are texts.
    _send.__annotations__.clear()

    def arrive(self) -> None:
        for scatter in self._scatters:
            scatter.arrive()
        for params, flat, work in self._everywhere:
            work.wait()
            totals = torch.split(flat, [param.numel() for param in params])
            for param, total in zip(params, totals, strict=True):
                if param.grad is not None:
                    param.grad.copy_(total.view_as(param))
        self._everywhere.clear()

    def parts(self) -> list[Tensor]:
        return [*self._own(), *self._averaged()]

    def counted(self) -> list[Tensor]:
        return self.parts() if self._first else self._own()

    def _own(self) -> list[Tensor]:
        return [scatter.own for scatter in self._scatters if scatter.own.numel()]

    def _averaged(self) -> list[Tensor]:
        everywhere = (p for p in self._parameters if p not in self._scatters_of)
        return [p.grad for p in everywhere if p.grad is not None]


def _trained(blocks: Sequence[ParamBlock]) -> list[ParamBlock]:
    """Those with gradients: code of a user's own may have frozen some."""
    return [block for block in blocks if block.param.requires_grad]
