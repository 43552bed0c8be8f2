"""What is outside an optimizer and not its own, such as torch's settings. They are looked at around
what somebody else's code does, and put back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import unwrap
from typing import Any

import torch
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


@contextmanager
def uncompiled() -> Iterator[None]:
    """What is to be compiled by torch runs as it is written: a trial would compile for minutes."""
    compiler, real = "torch._dynamo", torch.compile
    with ExitStack() as stack:

        def stop_compiling() -> None:
            stack.enter_context(torch.compiler.set_stance("force_eager"))

        def compile_later(*args: Any, **kwargs: Any) -> Any:
            stack.callback(setattr, torch, "compile", real)
            torch.compile = real
            stop_compiling()
            return real(*args, **kwargs)

        if compiler in sys.modules:
            stop_compiling()
        else:  # importing it takes a second, which most need not wait for
            stack.callback(setattr, torch, "compile", real)
            torch.compile = compile_later
        yield


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
