"""Torch's compiler, kept away from somebody else's optimizer where nobody waits for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from inspect import unwrap
from typing import Any

import torch
from torch.optim import Optimizer


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
