"""Refuses whatever would have Python wait for a GPU: reading a number, or a size that follows one.

Tensors are on the CPU here, where reading costs nothing, so it is the asking that is caught: by the
operators that read or size their result by what they read, and by the methods that hand memory to
Python without one. Copies to the CPU are refused by their destination, unless they are told not to
wait.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READING = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "masked_select",
    "unique", "_unique", "_unique2", "unique_consecutive", "unique_dim", "bincount", "histc",
    "repeat_interleave", "_assert_async",
    # What torch.tensor and the assignment of a number to a place make: a copy from memory that is
    # not pinned, for which Python waits.
    "lift_fresh", "lift_fresh_copy",
}  # fmt: skip
METHODS: set[Any] = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__float__,
    Tensor.__int__, Tensor.__index__, Tensor.__array__,
}  # fmt: skip


class WaitedError(Exception):
    """On a GPU this would have been a wait."""


def _refuse(what: str) -> None:
    ours = [
        frame
        for frame in traceback.extract_stack()
        if "/speedrun/" in frame.filename or "/tests/" in frame.filename
    ]
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in ours]
    place = ", ".join([one for one in places if "waits.py:" not in one or "test_" in one][-4:])
    raise WaitedError(f"{what} waits for the device, at {place}")


class _Operators(TorchDispatchMode):
    supports_higher_order_operators = True  # FlexAttention is one

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.count += 1
        name = getattr(func, "overloadpacket", func).__name__
        if name in READING and not (name == "repeat_interleave" and len(args) > 1):
            _refuse(f"aten::{name}")
        if name == "index" and any(
            isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1]
        ):
            _refuse("an index of booleans")
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        waits = not named.pop("non_blocking", False)
        words = [*args[1:], *named.values()]
        moved = func is Tensor.to and waits and any(str(word) == "cpu" for word in words)
        if func in METHODS or moved:
            _refuse(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class NoWaits:
    """While entered, whatever waits raises `WaitedError`; operators let through are counted."""

    def __enter__(self) -> Self:
        self._operators, self._methods = _Operators(), _Methods()
        for mode in (self._operators, self._methods):
            mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for mode in (self._methods, self._operators):
            mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    @property
    def operations(self) -> int:
        return self._operators.count
