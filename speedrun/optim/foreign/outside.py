"""What is outside an optimizer and not its own: the random numbers of the process, and torch's
settings. They are looked at around what somebody else's code does, and put back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.set_default_device": (torch.get_default_device, torch.set_default_device),
    "torch.set_num_threads": (torch.get_num_threads, torch.set_num_threads),
    "torch.set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.set_float32_matmul_precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "torch.use_deterministic_algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
}


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
    def seeded(seed: int) -> Streams:
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
def without_compiler() -> Iterator[None]:
    """torch has its compiler leave `add_param_group` alone, and imports that compiler to tell it:
    1.3 s of a run that compiles nothing. Here the note that it has been told is there already."""
    function, note = unwrap(Optimizer.add_param_group), "__dynamo_disable"
    told = hasattr(function, note)
    if not told:
        setattr(function, note, function)
    try:
        yield
    finally:
        if not told:
            delattr(function, note)


def _has_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@contextmanager
def settings_kept() -> Iterator[list[str]]:
    """Puts back torch's settings; in the list that it gives stands afterwards what was changed."""
    before = {name: get() for name, (get, _) in SETTINGS.items()}
    changed: list[str] = []
    try:
        yield changed
    finally:
        for name, (get, put) in SETTINGS.items():
            if get() != before[name]:
                changed.append(name)
                put(before[name])
