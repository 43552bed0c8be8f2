"""The symmetric product and the orthogonalisation that uses it, on shapes that fit no tile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speedrun.model.kernels import symmetric as kernel
from speedrun.model.kernels.symmetric import symmetric_product
from speedrun.optim.orthogonalize import orthogonalize

from .twins import UNIT, in_the_interpreter, normal

SHAPES = [(1, 1, 1), (3, 17, 40), (2, 32, 32), (1, 33, 5), (1, 130, 64), (2, 70, 200)]
TYPES = [torch.float32, torch.bfloat16]


def assert_product(x: Tensor, found: Tensor, exact: Tensor, side: int) -> None:
    """Beside the tiles on the diagonal, where both halves are computed, mirrored to the bit."""
    assert torch.equal(found[:, side:, :side], found[:, :side, side:].mT)
    off = (found.double() - exact).abs().max()
    assert off <= 4 * UNIT[x.dtype] * exact.abs().max()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tiles", [kernel.SMALL, kernel.TILES[9]])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("N", "m", "n"), SHAPES)
def test_against_float64(
    N: int, m: int, n: int, turned: bool, tiles: kernel.Tiles, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With X in rows or in columns, its square alone, then b A + c A^2."""
    monkeypatch.setattr(kernel, "tiles", lambda *_: tiles)
    x = normal(N, n, m, dtype=dtype).mT if turned else normal(N, m, n, dtype=dtype)
    a, both = (torch.full((N, m, m), torch.nan, dtype=dtype) for _ in range(2))
    symmetric_product(x, a)
    assert_product(x, a, x.double() @ x.double().mT, tiles[0])
    symmetric_product(a, both, alpha=2.0, add_Nmm=a, beta=0.5)
    assert_product(a, both, 2.0 * a.double() @ a.double().mT + 0.5 * a.double(), tiles[0])


def test_a_matrix_that_is_not_finite_leaves_its_neighbours() -> None:
    x, a = normal(3, 40, 50), torch.empty(3, 40, 40)
    x[1, 7, 3] = torch.nan
    symmetric_product(x, a)
    assert a[1, 7].isnan().all()
    assert a[1, :, 7].isnan().all()
    assert a[[0, 2]].isfinite().all()


@pytest.mark.parametrize("shape", [(40, 56), (56, 40), (3, 33, 33)])
def test_orthogonalisation(shape: tuple[int, ...]) -> None:
    """In bf16, which takes the plain polynomial, as near to fp64 as torch's products come."""
    G = normal(*shape)
    exact = orthogonalize(G.double(), dtype=torch.float64)
    theirs = orthogonalize(G, dtype=torch.bfloat16)
    with in_the_interpreter():
        ours = orthogonalize(G, dtype=torch.bfloat16)
    assert not torch.equal(ours, theirs)
    apart = [(x.double() - exact).norm() / exact.norm() for x in (ours, theirs)]
    assert apart[0] <= 3 * apart[1]
    assert apart[0] < 0.05
