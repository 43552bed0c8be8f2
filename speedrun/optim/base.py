"""The torch optimizer that ours extend."""

from __future__ import annotations

from inspect import unwrap
from typing import Any

from torch.optim import Optimizer


class UncompiledOptimizer(Optimizer):
    """`torch.optim.Optimizer` without the wait for a compiler.

    torch wraps these methods so that its compiler leaves them alone, and the wrapper imports that
    compiler at its first call: 1.3 s of a run that compiles nothing.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        unwrap(Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        unwrap(Optimizer.zero_grad)(self, set_to_none)
