"""Functions as torch operators, so that autograd and the compiler do not look inside them.

`torch.library.custom_op` would do it in one line, but imports torch's compiler at an operator's
first call: 1.3 s in every run, even if it compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def operator(name: str, like: Callable[..., Any]) -> Callable[[Function], Function]:
    """Register as `speedrun::NAME`; `like` makes empty outputs of the right shapes."""

    def register(function: Function) -> Function:
        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(f"speedrun::{name}", schema)
        torch.library.impl(f"speedrun::{name}", "default")(function)
        torch.library.register_fake(f"speedrun::{name}")(like)
        registered: Function = getattr(torch.ops.speedrun, name).default
        return registered

    return register


def differentiate(name: str, gradients: Callable[..., Any], keep: Callable[..., None]) -> None:
    """Register a backward; `keep(ctx, inputs, output)` saves in the forward what it needs."""
    torch.library.register_autograd(f"speedrun::{name}", gradients, setup_context=keep)
