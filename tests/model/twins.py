"""A native routine and its torch twin, side by side: values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from speedrun.model import native

Inputs = tuple[Tensor, ...]
every_build = pytest.mark.usefixtures("_each_build")
native_only = pytest.mark.usefixtures("_this_machine")


@contextmanager
def torch_only() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "load", lambda: "the test says so")
        yield


@contextmanager
def routines() -> Iterator[list[str]]:
    """The names of the native routines that are called meanwhile, in order."""
    names: list[str] = []
    run = native.run

    def noted(name: str, *arguments: Tensor | float | None) -> None:
        names.append(name)
        run(name, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "run", noted)
        yield names


def with_gradients(run: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """The value and the gradients of all floating inputs, for a fixed random gradient of out."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    out = run(*leaves)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    return out.detach(), *torch.autograd.grad(out, [x for x in leaves if x.requires_grad], g)


def assert_twins(run: Callable[..., Tensor], *inputs: Tensor, floor: float = 0.0) -> None:
    with routines() as called:
        found = with_gradients(run, *inputs)
    assert called, "the twin would be compared with itself"
    with torch_only():
        expected = with_gradients(run, *inputs)
    for a, b in zip(found, expected, strict=True):
        size = b.abs().max().item() if b.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * size + floor)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight(outputs: int, inputs: int, seed: int = 1) -> Tensor:
    matrix: Tensor = normal(outputs, inputs, seed=seed) / inputs**0.5
    return matrix


def targets_of(rows: int, V: int) -> Tensor:
    targets = torch.randint(0, V, (1, rows), generator=torch.Generator().manual_seed(3))
    targets[0, 0], targets[0, -1] = 0, V - 1
    return targets


def assert_same_ends(run: Callable[..., Tensor], *inputs: Tensor) -> None:
    found = with_gradients(run, *inputs)
    with torch_only():
        expected = with_gradients(run, *inputs)
    assert any(not x.isfinite().all() for x in expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
