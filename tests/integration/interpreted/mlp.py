"""The MLP: the kernel against float64, on shapes that fit no tile, and on what is not finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speedrun.model.kernels import mlp as kernel
from speedrun.model.kernels.mlp import hidden, hidden_gradient, mlp
from speedrun.model.products import add_mlp

from .twins import (
    UNIT,
    assert_as_close,
    assert_close,
    in_the_interpreter,
    normal,
    with_gradients,
)

# Tokens, width, hidden width: one of each, around tiles of 32, 128 and 256, several bands of tiles.
SHAPES = [(1, 1, 1), (17, 40, 33), (64, 32, 128), (129, 65, 257), (300, 7, 31), (1040, 16, 130)]


def formula(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.relu(x @ up.mT).square() @ down.mT


def inputs(N: int, D: int, F: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    up, down = normal(F, D, seed=1) / D**0.5, normal(D, F, seed=2) / F**0.5
    return normal(N, D, dtype=dtype), up.to(dtype), down.to(dtype)


@pytest.mark.parametrize(("N", "D", "F"), SHAPES)
def test_against_float64(N: int, D: int, F: int) -> None:
    given = inputs(N, D, F)
    exact = with_gradients(formula, *(x.double() for x in given))
    assert_as_close(with_gradients(mlp, *given), with_gradients(formula, *given), exact)


@pytest.mark.parametrize("tiles", [kernel.SMALL, *kernel.TILES.values()])
@pytest.mark.parametrize(("N", "D", "F"), SHAPES)
def test_in_bf16(
    N: int, D: int, F: int, tiles: kernel.Tiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either launch against float64 of the same bf16 inputs: only what is stored is rounded."""
    monkeypatch.setattr(kernel, "tiles", lambda *_: tiles)
    x, up, down = inputs(N, D, F, torch.bfloat16)
    h = hidden(x, up)
    exact = torch.relu(x.double() @ up.double().mT).square()
    torch.testing.assert_close(h.double(), exact, rtol=UNIT[torch.bfloat16], atol=1e-5)
    g = normal(N, D, seed=3, dtype=torch.bfloat16)
    dz = hidden_gradient(g, down, h)
    exact = 2 * h.double().sqrt() * (g.double() @ down.double())
    torch.testing.assert_close(dz.double(), exact, rtol=UNIT[torch.bfloat16], atol=1e-5)


def test_a_stream_in_bf16_with_weights_in_fp32() -> None:
    x, up, down = inputs(40, 48, 96)
    x = x.bfloat16()
    found = with_gradients(mlp, x, up, down)
    assert [a.dtype for a in found] == [torch.bfloat16] * 2 + [torch.float32] * 2
    rounded = (t.bfloat16().double() for t in (x, up, down))
    for a, b in zip(found, with_gradients(formula, *rounded), strict=True):
        assert (a.double() - b).abs().max() <= 4 * UNIT[torch.bfloat16] * b.abs().max()


def test_inputs_of_any_strides() -> None:
    """Columns before rows, and a gradient that is one number for all."""
    x, up, down = inputs(20, 24, 40)
    turned = [t.mT.contiguous().mT for t in (x, up, down)]
    assert not any(t.is_contiguous() for t in turned)
    leaves = [t.requires_grad_() for t in turned]
    found = torch.autograd.grad(mlp(*leaves).sum(), leaves)
    exact = [t.double().detach().requires_grad_() for t in (x, up, down)]
    assert_close(found, torch.autograd.grad(formula(*exact).sum(), exact), 64)


def test_no_tokens() -> None:
    found = with_gradients(mlp, *inputs(0, 24, 40))
    assert found[0].shape == (0, 24)
    assert not found[2].any()
    assert not found[3].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_ends_as_in_torch(bad: float) -> None:
    x, up, down = inputs(20, 24, 40)
    x[3, 5] = bad
    found, expected = (with_gradients(run, x, up, down) for run in (mlp, formula))
    assert not expected[0].isfinite().all()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiler_sees_one_operator(dtype: torch.dtype) -> None:
    x, up, down = inputs(24, 16, 40)
    run = lambda x, up, down: add_mlp(x.view(2, 12, 16), up, down, 1e-6, dtype)  # noqa: E731
    with in_the_interpreter():
        graph = torch.compile(run, backend="aot_eager", fullgraph=True)
        compiled, found = with_gradients(graph, x, up, down), with_gradients(run, x, up, down)
    for a, b in zip(compiled, found, strict=True):
        assert torch.equal(a, b)
    units = 64 if dtype == torch.float32 else 2.0**18
    theirs = with_gradients(run, *(t.double() for t in (x, up, down)))
    assert_close(found, theirs, units)
