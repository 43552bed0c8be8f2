"""The iteration against the SVD, on ordinary and on hostile matrices."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speedrun.optim import OptimError, orthogonalize
from speedrun.optim.orthogonalize import (
    CLASSIC,
    POLAR_EXPRESS,
    Triple,
    iteration,
    matmul_flops,
    native_dtype,
    scratch_numel,
)
from tests.optim.reference import polynomial_by_svd, run_bf16

SHAPES = [(8, 8), (5, 7), (7, 5), (4, 16), (16, 4), (3, 6, 40), (3, 40, 6), (2, 3, 5, 5)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["classic", "polar_express"])
def test_equals_the_polynomial_of_the_singular_values(shape: tuple[int, ...], name: str) -> None:
    G = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    triples = list(iteration(name).triples)
    expected = polynomial_by_svd(G, triples, margin=1.02 if name == "polar_express" else 1.0)
    torch.testing.assert_close(
        orthogonalize(G, coefficients=name).double(), expected, atol=1e-4, rtol=0
    )


def test_scalar_anchors() -> None:
    """diag(s, ...) keeps its singular vectors, so the diagonal shows the response itself."""
    anchors = {1e-4: 0.0485, 0.001: 0.4705, 0.003: 1.1104, 0.01: 0.6989, 0.03: 1.1223}
    anchors |= {0.1: 0.7121, 0.3: 1.0796, 0.5: 0.7654, 0.7: 1.1203, 0.9: 0.6820}
    for s, response in anchors.items():
        G = torch.diag(torch.tensor([s, math.sqrt(1 - s * s)]))
        assert orthogonalize(G)[0, 0].item() == pytest.approx(response, abs=2e-4)
    assert orthogonalize(torch.ones(1, 1)).item() == pytest.approx(0.6964, abs=1e-4)
    assert iteration().slope == pytest.approx(484.9, abs=0.05)
    assert iteration("polar_express").slope == pytest.approx(970, abs=0.5)


def test_singular_values_land_in_the_known_range() -> None:
    G = torch.randn(96, 192, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(orthogonalize(G))
    assert singular.min() > 0.6818 - 1e-3
    assert singular.max() < 1.1344 + 1e-3


def test_gram_form_agrees_on_ill_conditioned_matrices() -> None:
    """Singular values over six decades: the worst case of working on X X^T."""
    g = torch.Generator().manual_seed(2)
    U, _, Vh = torch.linalg.svd(torch.randn(64, 256, generator=g), full_matrices=False)
    G = U @ torch.diag(torch.logspace(0, -6, 64)) @ Vh
    for name, bound in (("classic", 5e-3), ("polar_express", 2e-2)):
        margin = iteration(name).margin
        expected = polynomial_by_svd(G, list(iteration(name).triples), margin)
        gap = orthogonalize(G, coefficients=name).double() - expected
        assert torch.linalg.matrix_norm(gap, 2) < bound
    # Twelve steps of slope 2 amplify the rounding of X X^T 4096^2 times: the plain form is taken.
    gentle: list[Triple] = [(2.0, -1.5, 0.5)] * 12
    gap = orthogonalize(G, coefficients=gentle, iterations=12).double() - polynomial_by_svd(
        G, gentle
    )
    assert torch.linalg.matrix_norm(gap, 2) < 1e-3


def test_batch_is_the_loop_over_its_matrices() -> None:
    for shape in ((6, 32, 32), (6, 16, 48), (6, 48, 16)):
        G = torch.randn(shape)
        loop = torch.stack([orthogonalize(matrix) for matrix in G])
        torch.testing.assert_close(orthogonalize(G), loop, atol=1e-5, rtol=0)


def test_zero_gives_zero() -> None:
    for shape in ((4, 4), (4, 12), (12, 4)):
        assert torch.equal(orthogonalize(torch.zeros(shape)), torch.zeros(shape))
    assert torch.equal(orthogonalize(torch.zeros(4, 4, dtype=torch.float16)), torch.zeros(4, 4))
    assert orthogonalize(torch.zeros(0, 4, 4)).shape == (0, 4, 4)


def test_rank_one_and_vectors() -> None:
    u, v = torch.randn(24, 1), torch.randn(1, 40)
    direction = (u / u.norm()) @ (v / v.norm())
    torch.testing.assert_close(orthogonalize(u @ v), 0.6964 * direction, atol=2e-4, rtol=0)
    torch.testing.assert_close(orthogonalize(v), 0.6964 * v / v.norm(), atol=1e-4, rtol=0)
    torch.testing.assert_close(orthogonalize(u), 0.6964 * u / u.norm(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [1e38, 1e30, 1e20, 1e10])
def test_huge_entries_do_not_overflow(size: float) -> None:
    G = torch.rand(6, 20) * 2 - 1
    torch.testing.assert_close(orthogonalize(G * size), orthogonalize(G), atol=1e-5, rtol=0)


def test_tiny_entries_fade_below_eps() -> None:
    G = torch.randn(6, 6)
    G /= G.norm()
    torch.testing.assert_close(orthogonalize(G * 1e-3), orthogonalize(G), atol=2e-3, rtol=0)
    torch.testing.assert_close(
        orthogonalize(G * 1e-30, eps=0.0), orthogonalize(G, eps=0.0), atol=3e-5, rtol=0
    )
    faded = orthogonalize(G * 1e-12)
    torch.testing.assert_close(faded, G * 1e-5 * iteration().slope, rtol=1e-2, atol=1e-7)
    assert orthogonalize(G * 1e-40).abs().max() < 1e-20


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(3, 5, 5), (3, 4, 12), (3, 12, 4)])
def test_a_poisoned_matrix_is_nan_and_its_neighbours_are_not(
    poison: float, shape: tuple[int, ...]
) -> None:
    clean = torch.randn(shape)
    G = clean.clone()
    G[1, 2, 3] = poison
    result = orthogonalize(G)
    assert result[1].isnan().all()
    assert torch.equal(result[[0, 2]], orthogonalize(clean)[[0, 2]])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 2**31))
def test_any_shape_is_bounded_and_keeps_its_transpose(rows: int, cols: int, seed: int) -> None:
    G = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    result = orthogonalize(G)
    assert torch.linalg.matrix_norm(result, 2) < 1.21
    torch.testing.assert_close(orthogonalize(G.mT), result.mT, atol=1e-5, rtol=0)


def test_writes_into_out_and_scratch_and_leaves_the_source_alone() -> None:
    for shape in ((2, 6, 6), (2, 5, 20), (2, 20, 5)):
        G = torch.randn(shape)
        before, out = G.clone(), torch.full(shape, 7.0)
        scratch = torch.empty(scratch_numel(*shape))
        expected = orthogonalize(G)
        assert orthogonalize(G, out=out, scratch=scratch) is out
        assert torch.equal(out, expected)
        assert torch.equal(G, before)
        orthogonalize(G, out=G, scratch=scratch)
        assert torch.equal(G, expected)


def test_dtype_is_the_devices_or_the_callers() -> None:
    assert native_dtype(torch.device("cpu")) == torch.float32
    assert orthogonalize(torch.randn(4, 4).bfloat16()).dtype == torch.float32
    assert orthogonalize(torch.randn(4, 4), dtype=torch.float64).dtype == torch.float64


BF16 = """
import torch
from speedrun.optim import orthogonalize
torch.manual_seed(0)
G = torch.randn(192, 384)
exact, rounded = orthogonalize(G), orthogonalize(G, dtype=torch.bfloat16)
assert rounded.dtype == torch.bfloat16
gap = (rounded.float() - exact).norm() / exact.norm()
assert 0.001 < gap < 0.05, gap
print("done")
"""


def test_bf16_is_within_a_few_percent() -> None:
    run_bf16(BF16)


def test_flop_count_matches_the_products() -> None:
    assert matmul_flops(768, 768, gram=False) == 5 * 3 * 2 * 768**3
    assert matmul_flops(3072, 768, gram=False) == 45 * 2 * 768**3
    assert matmul_flops(768, 3072, gram=True) == 25 * 2 * 768**3


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(OptimError, match="2 or more dimensions"):
        orthogonalize(torch.ones(3))
    with pytest.raises(OptimError, match="polar_express"):
        orthogonalize(torch.ones(3, 3), coefficients="polar_express", iterations=4)
    with pytest.raises(OptimError, match="unknown"):
        iteration("quintic")
    with pytest.raises(OptimError, match="one per iteration"):
        iteration([CLASSIC], iterations=5)
    assert iteration(POLAR_EXPRESS).triples == POLAR_EXPRESS
