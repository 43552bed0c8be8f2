"""The ranks of a run: one process, or many started by torchrun.

torchrun tells a process its place by environment variables; without them the world is this process
alone and every question has a local answer. Gloo serves CPUs, NCCL serves GPUs. What ranks tell
each other is numbers and bytes: nothing is pickled.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from speedrun.errors import ConfigError, RunError, SpeedrunError
from speedrun.limits import threads

# torchrun names the rank that ends first and ends the others: the one with a message goes first.
QUIET_SECONDS = 1.0


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
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return World.alone(device)
        try:
            local, local_size = (int(os.environ[k]) for k in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        except (KeyError, ValueError):
            raise ConfigError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but LOCAL_RANK and LOCAL_WORLD_SIZE do "
                "not say which rank this is; start ranks with torchrun or with --ranks"
            ) from None
        if device.type == "cuda":
            if local >= torch.cuda.device_count():
                raise ConfigError(
                    f"rank {local} of this host has no GPU: torch sees {torch.cuda.device_count()} "
                    f"for {local_size} ranks; start one rank per GPU"
                )
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            try:
                _meet("nccl" if device.type == "cuda" else "gloo")
            except (RuntimeError, ValueError) as error:
                raise RunError(
                    f"the ranks could not meet: {_gist(error)}; check MASTER_ADDR, MASTER_PORT "
                    "and the network"
                ) from error
        return World(dist.get_rank(), dist.get_world_size(), local_size, device)

    @staticmethod
    def leave() -> None:
        """A process that exits with its group alive aborts."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def end(self, code: int) -> None:
        """End this process with that code, if it has one or is a rank of several.

        Threads of gloo's, which torch leaves behind, may still give back a tensor when Python ends
        by its own way, and abort the process where there is no interpreter any more: a rank leaves
        at once.
        """
        if self.size > 1:
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
        if code:
            sys.exit(code)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def threads(self) -> int:
        """CPU threads for this rank: ranks that share cores must not each use all of them."""
        return threads(self.local_size)

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums of each value over all ranks, the same on every rank."""
        if self.size == 1:
            return [float(value) for value in values]
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor]

    def add_up(self, tensor: Tensor) -> None:
        """Each number becomes the sum over all ranks, where it is; nobody waits for it."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def gather(self, value: float) -> list[float]:
        """Every rank's value, in the order of the ranks."""
        return self.sum([value if rank == self.rank else 0.0 for rank in range(self.size)])

    def from_first(self, value: int) -> int:
        """Rank 0's number."""
        return round(self.sum([value if self.first else 0])[0])

    def text_from_first(self, text: str) -> str:
        """Rank 0's text."""
        if self.size == 1:
            return text
        data = list(text.encode()) if self.first else []
        received = torch.zeros(self.from_first(len(data)), dtype=torch.uint8, device=self.device)
        if self.first:
            received.copy_(torch.tensor(data, dtype=torch.uint8))
        dist.broadcast(received, src=0)
        return bytes(received.tolist()).decode()

    def barrier(self) -> None:
        self.sum([0.0])

    @contextmanager
    def together(self) -> Iterator[None]:
        """A user's mistake met on any rank ends all of them, with one message: that of the lowest.

        The block must not talk to other ranks: one that failed early would not answer.
        """
        failure: SpeedrunError | None = None
        try:
            yield
        except SpeedrunError as error:
            failure = error
        codes = [round(code) for code in self.gather(failure.exit_code if failure else 0)]
        if failure and not any(codes[: self.rank]):
            raise failure
        if any(codes):
            time.sleep(QUIET_SECONDS)
            sys.exit(next(filter(None, codes)))

    @contextmanager
    def watching_peers(self) -> Iterator[None]:
        """Where a rank dies the others cannot go on; theirs is not the message that matters."""
        try:
            yield
        except RuntimeError as error:
            if self.size > 1 and (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise RunError(
                    f"rank {self.rank} stops because another rank has gone, and that one's own "
                    f"message says why ({_gist(error)})"
                ) from None
            raise


def _meet(backend: str) -> None:
    """Join the process group of this attempt.

    torchrun's store outlives a restart, and with it the addresses of dead ranks: whoever reads one
    before it is written anew finds nobody there. So each attempt has names of its own. Hosts count
    attempts apart from each other, so there only a store that is new each time will do.
    """
    several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if several and shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise ConfigError(
            "torchrun --max-restarts on several hosts needs the environment variable "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: the store it shares with ranks otherwise keeps "
            "the addresses of dead ones"
        )
    store, rank, size = next(rendezvous("env://"))
    if not several:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def _gist(error: Exception) -> str:
    """The first sentence of a backend's message, without the place in its source."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]*\]\s*", "", line).partition(". ")[0]
