"""Torch's settings, which hold for all code of a process. They are looked at around what somebody
else's code does, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from speedrun.streams import Streams

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
    "torch.set_flush_denormal": (
        lambda: not bool(torch.full((), 1e-39) * 1.0),  # which torch does not tell
        torch.set_flush_denormal,
    ),
    **{
        f"torch.backends.{name}": (
            partial(getattr, backend, flag),
            partial(setattr, backend, flag),
        )
        for name, backend, flag in (
            ("mkldnn.enabled", torch.backends.mkldnn, "enabled"),
            ("cudnn.enabled", torch.backends.cudnn, "enabled"),
            ("cudnn.benchmark", torch.backends.cudnn, "benchmark"),
            ("cudnn.deterministic", torch.backends.cudnn, "deterministic"),
        )
    },
}


@contextmanager
def settings_kept() -> Iterator[list[str]]:
    """Puts back torch's settings; in the list that it gives stands afterwards what was changed."""
    before = {name: get() for name, (get, _) in SETTINGS.items()}
    changed: list[str] = []
    try:
        yield changed
    finally:
        for name, (get, put) in SETTINGS.items():
            if _asked(get) != before[name]:
                changed.append(name)
                put(before[name])


def _asked(get: Callable[[], Any]) -> Any:
    """Torch refuses to tell some, once they were set in two ways that do not fit together."""
    try:
        return get()
    except RuntimeError:
        return None


@contextmanager
def untouched() -> Iterator[None]:
    """Importing a file must not change a run: random numbers and settings stay as they were."""
    with settings_kept(), Streams.now().used():
        yield
