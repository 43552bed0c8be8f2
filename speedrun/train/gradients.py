"""Gradients between the backward and the update: averaged over ranks, held to a norm."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from speedrun.config.schema import MachineConfig
from speedrun.model.planned import Planned

SMALL_BUCKETS = 1  # MB of gradients sent at once in a rehearsal, so that a toy has several, too
SELDOM = 1_000_000_000  # steps


def averaging(passes: Planned, machine: MachineConfig) -> DistributedDataParallel:
    """The model with gradients averaged over ranks, in the very buckets they are sent in.

    Our buffers are not sent at each step: they are the angles of the positions, which never change.
    Those of users' own code may, and a checkpoint has the first rank's. Such code may leave a
    parameter aside on one rank, as where no token of its rows goes to an expert.
    """
    model = passes.model
    newer = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    own = tuple(f"{place}." for place in model.custom)
    changing = any(name.startswith(own) for name, _ in model.named_buffers())
    quiet: dict[str, Any] = {"forward_sync_buffers" if newer else "broadcast_buffers": changing}
    shared = DistributedDataParallel(
        passes,
        gradient_as_bucket_view=machine.bucket_views,
        bucket_cap_mb=SMALL_BUCKETS if machine.rehearsal else None,
        find_unused_parameters=not model.blocks_are_ours,
        **quiet,
    )
    # Its own statistics wait for the device, every hundredth step unless told otherwise.
    quieten: Any = shared._set_ddp_runtime_logging_sample_rate
    quieten(SELDOM)
    return shared


def clip_gradients(parameters: Iterable[Tensor], norm: float | Tensor, limit: float) -> None:
    """Scale gradients of the given norm down to `limit`, if there is one (0: none)."""
    if not limit or (isinstance(norm, float) and norm <= limit):
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    if isinstance(norm, float):
        torch._foreach_mul_(gradients, limit / norm)
        return
    factor = (limit / norm).clamp(max=1.0).float()
    torch._foreach_mul_([g for g in gradients if g.dtype == factor.dtype], factor)
    for gradient in gradients:
        if gradient.dtype != factor.dtype:  # in which the factor would be rounded
            gradient.copy_(gradient.float() * factor)
