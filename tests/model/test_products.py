"""Matrix products with what stands around them: every routine against its torch twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from speedrun.model.products import add_linear, add_mlp, head_loss, linear, norm_qkv
from speedrun.model.rotary import Rotary

from . import builds
from .twins import (
    Inputs,
    assert_same_ends,
    assert_twins,
    every_build,
    native_only,
    normal,
    routines,
    targets_of,
    weight,
    with_gradients,
)

pytestmark = pytest.mark.usefixtures("_however_few_rows")
EPS = 1e-6
# Rows around the routines' blocks and pieces; inputs beyond the depth of one pass; widths that are
# no whole panel: (rows, inputs, outputs).
LINEAR = [(1, 16, 16), (31, 48, 80), (32, 400, 16), (97, 80, 192), (385, 192, 48), (769, 16, 80)]


@every_build
@pytest.mark.parametrize(("rows", "wide", "out"), LINEAR)
def test_linear(rows: int, wide: int, out: int) -> None:
    assert_twins(linear, normal(rows, wide), weight(out, wide))


@every_build
@pytest.mark.parametrize(("rows", "wide", "out"), LINEAR)
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_add_linear(rows: int, wide: int, out: int, factor: float) -> None:
    run: Callable[..., Tensor] = lambda x, h, w: add_linear(x, h, w, factor)  # noqa: E731
    assert_twins(run, normal(1, rows, out, seed=2), normal(1, rows, wide), weight(out, wide))


@every_build
@pytest.mark.parametrize(
    ("rows", "D", "F"),
    [(1, 16, 64), (31, 48, 192), (32, 192, 80), (97, 80, 320), (385, 16, 400), (769, 48, 16)],
)
def test_add_mlp(rows: int, D: int, F: int) -> None:
    x = normal(1, rows, D)
    x[0, rows // 2] = 0
    assert_twins(lambda x, up, down: add_mlp(x, up, down, EPS),
                 x, weight(F, D), weight(D, F, seed=2))  # fmt: skip


@every_build
@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize(
    ("B", "T", "D", "H", "G", "K"),
    [
        (1, 1, 16, 1, 1, 16),
        (1, 31, 48, 2, 1, 16),
        (2, 16, 80, 6, 2, 8),
        (1, 97, 192, 3, 3, 64),
        (7, 55, 48, 4, 1, 48),
        (1, 769, 16, 2, 2, 80),
    ],
)
def test_norm_qkv(
    B: int, T: int, D: int, H: int, G: int, K: int, rotated: bool, qk_norm: bool
) -> None:
    angles = Rotary(K, T + 5, half=False).angles(5, T) if rotated else None

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        parts = norm_qkv(x, weights, angles, K, EPS, qk_norm=qk_norm)
        assert [part.shape for part in parts] == [(B, T, heads, K) for heads in (H, G, G)]
        return torch.cat([part.flatten() for part in parts])

    weights = [weight(heads * K, D, seed=heads + 3) for heads in (H, G, G)]
    assert_twins(run, normal(B, T, D), *weights)
    # One parameter for all three, of which the routine gets views.
    sizes = [len(w) for w in weights]
    assert_twins(lambda x, w: run(x, *w.split(sizes)), normal(B, T, D), torch.cat(weights))


@native_only
@pytest.mark.parametrize("used", [0, 1, 2])
def test_what_is_not_used_of_queries_keys_and_values_has_no_gradient(used: int) -> None:
    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return norm_qkv(x, weights, None, 16, EPS, qk_norm=True)[used]

    weights = [weight(32, 48, seed=seed) for seed in range(3)]
    found = with_gradients(lambda x, *w: run(x, *w), normal(1, 40, 48), *weights)
    assert [g.any().item() for g in found[2:]] == [part == used for part in range(3)]


@every_build
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_in_a_layer_ends_as_in_torch(bad: float) -> None:
    x, w = normal(1, 40, 16), weight(32, 16)
    x[0, 7, 3] = bad
    assert_same_ends(linear, x, w)
    assert_same_ends(lambda h, w: add_linear(torch.zeros(1, 40, 32), h, w, 0.5), x, w)
    qkv: Callable[..., Tensor] = lambda x, w: torch.cat(  # noqa: E731
        norm_qkv(x, (w, w, w), None, 16, EPS, qk_norm=True)
    )
    assert_same_ends(qkv, x, w)
    assert_same_ends(lambda x, w: add_mlp(x, w, weight(16, 32), EPS), x, w)


# More rows than any number of threads takes at once.
MANY = 1600
RUNS: dict[str, tuple[Callable[..., Tensor], Inputs]] = {
    "linear": (linear, (normal(MANY, 32), weight(48, 32))),
    "add_linear": (
        lambda x, h, last: add_linear(x, h, last, 0.3),
        (normal(1, MANY, 48), normal(1, MANY, 32), weight(48, 32)),
    ),
    "norm_qkv": (
        lambda x, *weights: torch.cat(norm_qkv(x, weights, None, 16, EPS, qk_norm=True)),
        (normal(1, MANY, 48), *(weight(32, 48, seed=seed) for seed in range(3))),
    ),
    "add_mlp": (
        lambda x, up, down: add_mlp(x, up, down, EPS),
        (normal(1, MANY, 32), weight(80, 32), weight(32, 80)),
    ),
    "head_loss": (
        lambda x, head: head_loss(x, head, targets_of(x.size(1), 129), 15.0),
        (normal(1, MANY, 16), weight(129, 16)),
    ),
}


@every_build
@pytest.mark.parametrize("name", RUNS)
def test_bits_do_not_depend_on_the_number_of_threads(name: str) -> None:
    run, inputs = RUNS[name]
    builds.assert_threads_do_not_matter(lambda: with_gradients(run, *inputs))


@native_only
@pytest.mark.parametrize("name", RUNS)
def test_layouts_do_not_matter(name: str) -> None:
    """Inputs that lie otherwise in memory, and a gradient that is one number all over."""
    run, inputs = RUNS[name]
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = run(*leaves)
    plain = torch.autograd.grad(out, leaves, torch.ones(out.shape))
    turned = [x.mT.contiguous().mT.detach().requires_grad_() for x in inputs]
    other = torch.autograd.grad(run(*turned).sum(), turned)
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


NATIVE = {
    "linear": ["linear_forward", "linear_backward"],
    "add_linear": ["linear_forward", "linear_backward"],
    "norm_qkv": ["qkv_forward", "qkv_backward"],
    "add_mlp": ["mlp_forward", "mlp_backward"],
    "head_loss": ["head_loss"],
}


@native_only
@pytest.mark.parametrize("name", RUNS)
def test_what_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native routines in fp32; torch in other types, for a few rows and for broken vectors."""
    monkeypatch.undo()
    run, inputs = RUNS[name]
    with routines() as called:
        with_gradients(run, *inputs)
    assert called == NATIVE[name]
    for other in ([x.bfloat16() for x in inputs], fewer(inputs), narrower(name)):
        if other:
            with routines() as called:
                run(*other)
            assert not set(called) & {routine for names in NATIVE.values() for routine in names}


def fewer(inputs: Inputs) -> list[Tensor]:
    """The first 31 rows."""
    return [x.narrow(-2, 0, 31) if x.size(-2) == MANY else x for x in inputs]


def narrower(name: str) -> list[Tensor]:
    """A width of 24, which is no whole number of vectors on every CPU."""
    return {
        "linear": [normal(64, 24), weight(32, 24)],
        "add_linear": [normal(1, 64, 24), normal(1, 64, 32), weight(24, 32)],
        "norm_qkv": [normal(1, 64, 24), *(weight(32, 24) for _ in range(3))],
        "add_mlp": [normal(1, 64, 24), weight(80, 24), weight(24, 80)],
    }.get(name, [])


@native_only
def test_ops_are_sound() -> None:
    """torch's own checks: schemas, fake tensors, autograd registration, traced gradients."""
    ops = torch.ops.speedrun
    x = normal(2, 20, 16).requires_grad_()
    flat, h = normal(40, 16).requires_grad_(), normal(40, 32).requires_grad_()
    up, down = (weight(*shape).requires_grad_() for shape in ((32, 16), (16, 32)))
    angles = Rotary(16, 20, half=False).angles(0, 20)
    for op, arguments in (
        (ops.linear, (flat, up)),
        (ops.add_linear, (flat, h, down, 0.3)),
        (ops.norm_qkv, (x, up, up, up, *angles, EPS, 16, True)),
        (ops.norm_qkv, (x, up, up, up, None, None, EPS, 16, False)),
        (ops.add_mlp, (flat, up, down, EPS)),
    ):
        torch.library.opcheck(op.default, arguments)
    # The gradients that `head_loss` returns beside the loss are not differentiable themselves.
    loss = (flat.detach(), normal(50, 16), targets_of(40, 50)[0], 15.0, True)
    torch.library.opcheck(ops.head_loss.default, loss)
    torch.library.opcheck(ops.token_losses.default, loss[:-1])
