"""The ranks of a run: one process, or many started by torchrun.

torchrun tells a process its place by environment variables; without them the world is this process
alone and every question has a local answer. Gloo serves CPUs, NCCL serves GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from speedrun.hardware import cores


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    local_size: int
    device: torch.device

    @staticmethod
    def alone(device: torch.device) -> World:
        return World(0, 1, 1, device)

    @staticmethod
    def join(device: torch.device) -> World:
        """Take our place among the ranks that torchrun started, if it did."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return World.alone(device)
        local = int(os.environ["LOCAL_RANK"])
        if device.type == "cuda":
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return World(dist.get_rank(), size, int(os.environ["LOCAL_WORLD_SIZE"]), device)

    @staticmethod
    def leave() -> None:
        """A process that exits with its group alive aborts."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def threads(self) -> int:
        """CPU threads for this rank: ranks that share cores must not each use all of them."""
        return max(1, cores() // self.local_size)

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums of each value over all ranks, the same on every rank."""
        if self.size == 1:
            return [float(value) for value in values]
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor]

    def barrier(self) -> None:
        if self.size > 1:
            self.sum([0.0])
