"""Muon in one process: against its formula and its own promises."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from speedrun.optim import Muon, NonFiniteGradientError, OptimError, muon_update, orthogonalize
from speedrun.optim.layout import update_scale
from tests.optim.reference import muon_step

MIXED = [(16, 16), (32, 8), (8, 32), (16, 16), (8, 32), (5, 5), (16, 16)]


def make_params(shapes: Sequence[tuple[int, ...]], seed: int = 0) -> list[Parameter]:
    g = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=g) * 0.1) for shape in shapes]


def momentum_of(optimizer: Muon, param: Tensor) -> Tensor:
    return optimizer.whole_state()[param]["momentum"]


def set_grads(params: list[Parameter], step: int) -> None:
    g = torch.Generator().manual_seed(1000 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=g).to(param.dtype)


def train(optimizer: torch.optim.Optimizer, params: list[Parameter], steps: range) -> None:
    for step in steps:
        set_grads(params, step)
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "weight_decay": 0.1},
        {"weight_decay": 0.1, "cautious": True},
        {"neuron_beta": 0.9},
        {"neuron_beta": 0.7, "nesterov": False, "weight_decay": 0.1, "cautious": True},
    ],
)
def test_equals_the_formula_matrix_by_matrix(options: dict[str, Any]) -> None:
    params = make_params(MIXED)
    twins = [p.detach().clone() for p in params]
    momenta = [torch.zeros_like(p) for p in twins]
    neurons = [torch.zeros(max(p.shape)) for p in twins]
    optimizer = Muon(params, lr=0.05, momentum=0.9, **options)
    for step in range(4):
        set_grads(params, step)
        grads = [p.grad.clone() for p in params if p.grad is not None]
        optimizer.step()
        state = optimizer.whole_state()
        for p, g, twin, momentum, squares in zip(
            params, grads, twins, momenta, neurons, strict=True
        ):
            muon_step(twin, g, momentum, squares, lr=0.05, mu=0.9, **options)
            assert p.grad is not None
            assert torch.equal(p.grad, g), "gradients are read, not written"
            torch.testing.assert_close(p.detach(), twin, atol=3e-6, rtol=0)
            torch.testing.assert_close(state[p]["momentum"], momentum, atol=1e-6, rtol=0)
            if "neuron_beta" in options:
                found = state[p]["neurons"].flatten()
                torch.testing.assert_close(found, squares, atol=1e-6, rtol=1e-5)
            else:
                assert set(state[p]) == {"momentum"}


@pytest.mark.parametrize("shape", [(3, 6, 10), (3, 10, 6)])
def test_the_update_of_a_batch_is_the_formula_for_upright_matrices(shape: tuple[int, ...]) -> None:
    grad, before = torch.randn(shape), torch.randn(shape)
    options = {**Muon.options().values(), "momentum": 0.9}
    for nesterov in (True, False):
        momentum = 0.9 * before + 0.1 * grad
        expected = orthogonalize(0.1 * grad + 0.9 * momentum if nesterov else momentum)
        state = {"momentum": before.clone()}
        update = muon_update(grad.clone(), state, {**options, "nesterov": nesterov})
        torch.testing.assert_close(update, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(state["momentum"], momentum)


def test_heavy_ball_momentum_gives_the_same_direction() -> None:
    """At constant mu, M <- mu M + g and its running average differ by a factor only."""
    [param] = make_params([(12, 20)])
    optimizer = Muon([param], lr=1.0)
    ball = torch.zeros(12, 20)
    for step in range(3):
        set_grads([param], step)
        before = param.detach().clone()
        optimizer.step()
        assert param.grad is not None
        ball = 0.95 * ball + param.grad
        expected = orthogonalize(param.grad + 0.95 * ball)
        torch.testing.assert_close(before - param.detach(), expected, atol=1e-5, rtol=0)


def test_matrices_of_one_shape_go_in_one_batched_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def spy(staged: Tensor, **kwargs: Any) -> Tensor:
        calls.append(tuple(staged.shape))
        return orthogonalize(staged, **kwargs)

    monkeypatch.setattr("speedrun.optim.muon.orthogonalize", spy)
    params = make_params(MIXED)
    train(Muon(params), params, range(1))
    # three squares, one tall, two wide, and a single square
    assert sorted(calls) == [(1, 5, 5), (1, 32, 8), (2, 8, 32), (3, 16, 16)]


def test_scales() -> None:
    assert update_scale("spectral", 3072, 768) == 2.0
    assert update_scale("spectral", 768, 3072) == update_scale("spectral", 768, 768) == 1.0
    assert update_scale("rms", 768, 3072) == pytest.approx(0.2 * math.sqrt(3072))
    assert update_scale("none", 3072, 768) == 1.0
    g = torch.randn(12, 6)
    for scale in ("spectral", "rms", "none"):
        param = Parameter(torch.zeros(12, 6))
        param.grad = g
        Muon([param], lr=0.5, scale=scale).step()
        expected = -0.5 * update_scale(scale, 12, 6) * orthogonalize(g)
        torch.testing.assert_close(param.detach(), expected, atol=1e-5, rtol=0)


def update_of(shape: tuple[int, ...], grad: Tensor, **options: Any) -> Tensor:
    param = Parameter(torch.zeros(shape))
    param.grad = grad
    Muon([param], lr=1.0, **options).step()
    return -param.detach()


def test_declared_splits_are_orthogonalised_apart() -> None:
    fused = torch.randn(24, 8)
    parts = [orthogonalize(part) for part in torch.chunk(fused, 3)]
    torch.testing.assert_close(update_of((24, 8), fused, split_rows=3), torch.cat(parts))
    heads = [math.sqrt(8 / 6) * orthogonalize(h) for h in torch.chunk(fused.mT, 4, dim=1)]
    torch.testing.assert_close(
        update_of((8, 24), fused.mT.contiguous(), split_cols=4), torch.cat(heads, dim=1)
    )
    whole = math.sqrt(3) * orthogonalize(fused)
    torch.testing.assert_close(update_of((24, 8), fused), whole)
    # tiles both ways: 2 x 2 blocks of 12 x 4, each taller than wide
    blocks = [
        torch.cat([math.sqrt(3) * orthogonalize(b) for b in torch.chunk(band, 2, dim=1)], dim=1)
        for band in torch.chunk(fused, 2)
    ]
    torch.testing.assert_close(
        update_of((24, 8), fused, split_rows=2, split_cols=2), torch.cat(blocks)
    )


def test_unequal_splits_take_the_scale_of_each_block() -> None:
    """Grouped-query attention: 16 rows of queries, 4 of keys, 4 of values."""
    fused = torch.randn(24, 8)
    for sizes in ((16, 4, 4), [16, 4, 4]):
        parts = [
            update_scale("spectral", *part.shape) * orthogonalize(part)
            for part in torch.split(fused, [16, 4, 4])
        ]
        torch.testing.assert_close(update_of((24, 8), fused, split_rows=sizes), torch.cat(parts))
    columns = [orthogonalize(part) for part in torch.split(fused.mT, [16, 8], dim=1)]
    torch.testing.assert_close(
        update_of((8, 24), fused.mT.contiguous(), split_cols=(16, 8)), torch.cat(columns, dim=1)
    )


def test_declared_flattening_and_batches() -> None:
    conv = torch.randn(6, 4, 3, 3)
    torch.testing.assert_close(
        update_of((6, 4, 3, 3), conv, row_dims=1),
        orthogonalize(conv.view(6, 36)).view(6, 4, 3, 3),
    )
    torch.testing.assert_close(
        update_of((6, 4, 3, 3), conv, row_dims=2),
        math.sqrt(24 / 9) * orthogonalize(conv.view(24, 9)).view(6, 4, 3, 3),
    )
    experts = torch.randn(5, 8, 4)
    torch.testing.assert_close(
        update_of((5, 8, 4), experts, batch_dims=1), math.sqrt(2) * orthogonalize(experts)
    )


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((7,), {}, "give it to Adam"),
        ((2, 3, 4), {}, r"row_dims=1 makes 2 x 12 of it, batch_dims=1 makes 2 matrices of 3 x 4"),
        ((2, 3, 4), {"batch_dims": 2}, "stay below 3"),
        ((8, 4), {"split_rows": 3}, "add up to 8"),
        ((8, 4), {"split_rows": (4, 3)}, "add up to 8"),
        ((8, 4), {"split_cols": 0}, "add up to 4"),
        ((8, 0), {}, "no entries"),
        ((4, 4), {"lr": -1.0}, "lr is -1"),
        ((4, 4), {"momentum": 1.0}, "momentum is 1.0, but it must be less than 1"),
        ((4, 4), {"weight_decay": math.nan}, "weight_decay is nan"),
        ((4, 4), {"scale": "moonlight"}, "spectral"),
        ((4, 4), {"iterations": 0}, "iterations is 0"),
        ((4, 4), {"iterations": 101}, "iterations is 101, but 'classic' takes 1 to 100"),
        ((4, 4), {"coefficients": [(2.0, -1.5, 0.5)]}, "iterations is 5, but there are 1 triples"),
        ((4, 4), {"coefficients": "quintic"}, "coefficients is 'quintic'"),
        ((4, 4), {"dtype": torch.int8}, "dtype is torch.int8.*floating-point"),
        ((4, 4), {"eps": 0.0}, "eps is 0.0, but it must be greater than 0"),
        ((4, 4), {"steps": 5}, "steps is not an option of muon; its options are lr, momentum"),
        ((4, 4), {"split_qkv": True}, "split_qkv is not an option of muon"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptimError, match=message) as caught:
        Muon([("blocks.0.weight", Parameter(torch.ones(shape)))], **options)
    if "parameter" in str(caught.value):
        assert "blocks.0.weight" in str(caught.value)


def test_parameters_that_are_not_plain_are_refused() -> None:
    with pytest.raises(OptimError, match="contiguous"):
        Muon([Parameter(torch.ones(4, 6).mT)])
    with pytest.raises(OptimError, match="floating"):
        Muon([Parameter(torch.ones(4, 6, dtype=torch.complex64))])


def test_param_groups_have_their_own_options() -> None:
    params = make_params([(8, 8), (8, 8)])
    twins = make_params([(8, 8), (8, 8)])
    groups = [{"params": params[:1], "lr": 0.1}, {"params": params[1:], "weight_decay": 0.5}]
    train(Muon(groups, lr=0.01), params, range(1))
    set_grads(twins, 0)
    for twin, lr, decay in zip(twins, (0.1, 0.01), (0.0, 0.5), strict=True):
        assert twin.grad is not None
        muon_step(twin.detach(), twin.grad, torch.zeros(8, 8), lr=lr, weight_decay=decay)
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, atol=3e-6, rtol=0)


def test_a_group_can_be_added_later() -> None:
    params = make_params([(8, 8), (8, 8)])
    optimizer = Muon(params[:1])
    train(optimizer, params, range(1))
    kept = momentum_of(optimizer, params[0]).clone()
    optimizer.add_param_group({"params": params[1:], "lr": 0.5})
    assert torch.equal(momentum_of(optimizer, params[0]), kept)
    before = params[1].detach().clone()
    train(optimizer, params, range(1))
    assert not torch.equal(params[1], before)
    with pytest.raises(OptimError, match="give it to Adam"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(3))]})
    train(optimizer, params, range(1, 2))
    assert len(optimizer.param_groups) == 2


def test_a_parameter_without_gradient_is_left_alone() -> None:
    params = make_params([(8, 8)] * 3)
    optimizer = Muon(params, weight_decay=0.1)
    train(optimizer, params, range(2))
    set_grads(params, 2)
    params[1].grad = None
    before, momentum = params[1].detach().clone(), momentum_of(optimizer, params[1]).clone()
    others = [p.detach().clone() for p in params]
    optimizer.step()
    assert torch.equal(params[1], before)
    assert torch.equal(momentum_of(optimizer, params[1]), momentum)
    assert not torch.equal(params[0], others[0])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_non_finite_gradient_changes_nothing(poison: float) -> None:
    params = make_params(MIXED)
    named = [(f"layer.{i}", p) for i, p in enumerate(params)]
    optimizer = Muon(named)
    train(optimizer, params, range(2))
    weights = [p.detach().clone() for p in params]
    momenta = [momentum_of(optimizer, p).clone() for p in params]
    set_grads(params, 2)
    assert params[3].grad is not None
    params[3].grad[2, 5] = poison
    with pytest.raises(NonFiniteGradientError, match=r"layer\.3 holds"):
        optimizer.step()
    for p, weight, momentum in zip(params, weights, momenta, strict=True):
        assert torch.equal(p, weight)
        assert torch.equal(momentum_of(optimizer, p), momentum)


def test_a_huge_finite_gradient_is_not_taken_for_an_infinite_one() -> None:
    param = Parameter(torch.zeros(8, 8))
    param.grad = torch.full((8, 8), 1e38)
    Muon([param]).step()
    assert param.isfinite().all()
    assert param.abs().max() > 0


def test_no_buffer_is_made_in_a_step() -> None:
    """The largest thing a step may allocate is far smaller than one matrix."""
    params = make_params([(96, 96)] * 4 + [(64, 256), (256, 64)])
    optimizer = Muon(params, weight_decay=0.1)
    train(optimizer, params, range(1))
    set_grads(params, 1)
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer.step()
    allocated = [event.self_cpu_memory_usage for event in profile.events() or []]
    assert any(allocated), "the profiler must see something"
    assert max(allocated) < 96 * 96 * 4 / 10


def test_schedulers_and_closures_work() -> None:
    [param] = make_params([(8, 8)])
    optimizer = Muon([param], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure() -> float:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    losses = []
    for _ in range(3):
        losses.append(optimizer.step(closure))
        schedule.step()
    assert losses[2] < losses[1] < losses[0]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 8)
    optimizer.set_momentum(0.85)
    assert optimizer.param_groups[0]["momentum"] == 0.85
