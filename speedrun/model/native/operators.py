"""Functions as torch operators, so that autograd and the compiler do not look inside them.

`torch.library.custom_op` would do it in one line, but imports torch's compiler at an operator's
first call: 1.3 s in every run, even if it compiles nothing. And calling any registered operator
goes through torch's dispatcher in Python, twice: outside of a compiled model a function of autograd
does the same in half the time, 1.3 ms of a small model's step of 85.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.autograd.function import once_differentiable

Function = TypeVar("Function", bound=Callable[..., Any])
_functions: dict[str, Callable[..., Any]] = {}
_differentiable: dict[str, type[torch.autograd.Function]] = {}


def operator(name: str, like: Callable[..., Any]) -> Callable[[Function], Function]:
    """Register as `speedrun::NAME`; `like` makes empty outputs of the right shapes."""

    def register(function: Function) -> Function:
        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(f"speedrun::{name}", schema)
        torch.library.impl(f"speedrun::{name}", "default")(function)
        torch.library.register_fake(f"speedrun::{name}")(like)
        registered = getattr(torch.ops.speedrun, name).default
        _functions[name] = function

        def call(*arguments: Any) -> Any:
            if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
                return registered(*arguments)  # somebody traces or watches
            if name in _differentiable and torch.is_grad_enabled():
                return _differentiable[name].apply(*arguments)  # type: ignore[no-untyped-call]
            return function(*arguments)

        return cast(Function, call)

    return register


def differentiate(name: str, gradients: Callable[..., Any], keep: Callable[..., None]) -> None:
    """Register a backward; `keep(ctx, inputs, output)` saves in the forward what it needs."""
    torch.library.register_autograd(f"speedrun::{name}", gradients, setup_context=keep)
    parts = {
        "forward": _functions[name],
        "setup_context": keep,
        "backward": once_differentiable(gradients),
    }
    members = {part: staticmethod(function) for part, function in parts.items()}
    _differentiable[name] = type(f"speedrun::{name}", (torch.autograd.Function,), members)
