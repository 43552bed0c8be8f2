"""A kernel in Triton's interpreter and its formula in torch, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from speedrun.model import kernels

CPU = torch.device("cpu")
# The interpreter cuts what it rounds to bf16 off, where a GPU rounds to the nearest.
UNIT = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}


@contextmanager
def in_the_interpreter() -> Iterator[None]:
    kernels.use_kernels(kernels.choose_kernels("triton", CPU)[0], CPU)
    try:
        yield
    finally:
        kernels.use_kernels("torch", CPU)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def with_gradients(run: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The value and the gradients of all inputs, for one random gradient of the value."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = run(*leaves)
    g = normal(*out.shape, seed=9).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


def assert_close(found: Sequence[Tensor], exact: Sequence[Tensor], units: float) -> None:
    """Within so many units of the last place of the largest number in the exact tensor."""
    for a, b in zip(found, exact, strict=True):
        assert a.shape == b.shape
        if b.numel():
            off = (a.double() - b.double()).abs().max().item()
            assert off <= units * UNIT[a.dtype] * b.double().abs().max().item(), off


def assert_as_close(
    found: Sequence[Tensor], theirs: Sequence[Tensor], exact: Sequence[Tensor]
) -> None:
    """Ours may err by twice as much as torch's, or by 128 roundings of the largest number."""
    for a, b, c in zip(found, theirs, exact, strict=True):
        assert a.shape == b.shape == c.shape
        unit = UNIT[a.dtype] * c.double().abs().max().item()
        mine, other = ((x.double() - c).abs().max().item() for x in (a, b))
        assert mine <= max(2 * other, 128 * unit), (mine, other, unit)
