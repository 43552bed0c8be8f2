"""Functions as torch operators, so that autograd and the compiler see them as single steps.

`torch.library.custom_op` would do it in one line, but imports the compiler at an operator's first
call: 1.3 s of every run that compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def operator(name: str, like: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """`speedrun::NAME`, known by its annotations; `like` makes outputs of the same shapes."""

    def register(function: Callable[..., Any]) -> Any:
        torch.library.define(
            f"speedrun::{name}", torch.library.infer_schema(function, mutates_args=())
        )
        torch.library.impl(f"speedrun::{name}", "default")(function)
        torch.library.register_fake(f"speedrun::{name}")(like)
        return getattr(torch.ops.speedrun, name).default

    return register


def differentiate(name: str, gradients: Callable[..., Any], keep: Callable[..., None]) -> None:
    """gradients(ctx, *gradients of the outputs), with what keep(ctx, inputs, output) kept."""
    torch.library.register_autograd(f"speedrun::{name}", gradients, setup_context=keep)
