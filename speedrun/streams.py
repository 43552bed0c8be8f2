"""The random numbers that all code of a process shares: torch's, numpy's and Python's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Streams:
    """Where the sources of random numbers that all code of a process shares stand."""

    torch: Tensor
    numpy: dict[str, Any]
    python: tuple[Any, ...]
    cuda: Tensor | None = None

    @staticmethod
    def now() -> Streams:
        cuda = torch.cuda.get_rng_state() if _has_cuda() else None
        numpy: Any = np.random.get_state(legacy=False)
        return Streams(torch.get_rng_state(), numpy, random.getstate(), cuda)

    @staticmethod
    def of(*place: object) -> Streams:
        """Streams that follow from a place, such as a seed and a name, and from nothing else."""
        digest = sha256(" ".join(map(str, place)).encode()).digest()
        seed = int.from_bytes(digest[:7])
        cpu = torch.Generator().manual_seed(seed).get_state()
        numpy: Any = np.random.RandomState(seed % 2**32).get_state(legacy=False)
        cuda = torch.Generator("cuda").manual_seed(seed).get_state() if _has_cuda() else None
        return Streams(cpu, numpy, random.Random(seed).getstate(), cuda)

    def put(self) -> None:
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)

    def moved(self, since: Streams) -> str:
        """Whose random numbers were drawn since; empty if none."""
        if not torch.equal(self.torch, since.torch):
            return "torch"
        both = self.cuda is not None and since.cuda is not None
        if both and not torch.equal(self.cuda, since.cuda):  # type: ignore[arg-type]
            return "torch.cuda"
        ours, theirs = self.numpy["state"], since.numpy["state"]
        rest = ("has_gauss", "gauss")
        if ours["pos"] != theirs["pos"] or not np.array_equal(ours["key"], theirs["key"]):
            return "numpy.random"
        if any(self.numpy[key] != since.numpy[key] for key in rest):
            return "numpy.random"
        return "random" if self.python != since.python else ""

    def plain(self) -> dict[str, Any]:
        return dict(vars(self))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, random numbers come from here; outside, nothing is missing."""
        before = Streams.now()
        self.put()
        try:
            yield
        finally:
            before.put()


def _has_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
