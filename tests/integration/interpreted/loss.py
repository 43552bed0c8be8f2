"""Head and loss: the kernel against float64, on shapes that fit nothing and what is not finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speedrun.model.kernels.loss import head_loss, losses_in_place, rows
from speedrun.model.products import head_loss as dispatched

from .twins import assert_as_close, assert_close, in_the_interpreter, normal, with_gradients

WEIGHTS = {1: (1.0,), 2: (1.0, 0.5), 3: (1.0, 0.5, 0.25)}


def targets(N: int, V: int, K: int) -> Tensor:
    """The next tokens, the ones behind them and so on; past the end there are none: -1."""
    ids = torch.randint(V, (N + K - 1,), generator=torch.Generator().manual_seed(3))
    found = torch.stack([ids[k : k + N] for k in range(K)])
    for k in range(1, K):
        found[k, N - min(k, N) :] = -1
    return found


def formula(x: Tensor, head: Tensor, targets_KN: Tensor, weights: Tensor, cap: float) -> Tensor:
    z = x @ head.mT
    z = cap * torch.tanh(z / cap) if cap else z
    each = [
        w * torch.nn.functional.cross_entropy(z, row, ignore_index=-1, reduction="sum")
        for w, row in zip(weights.tolist(), targets_KN, strict=True)
    ]
    return torch.stack(each).sum() / (targets_KN[0] >= 0).sum()


# Rows, width, vocabulary: one of each, around a piece of 8192 logits, and real vocabularies.
SHAPES = [(1, 16, 1), (5, 3, 17), (7, 16, 8191), (3, 8, 8193), (4, 16, 17_001), (2, 8, 50_257),
          (2, 8, 50_304)]  # fmt: skip


@pytest.mark.parametrize("cap", [0.0, 15.0])
@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize(("N", "D", "V"), SHAPES)
def test_against_float64(N: int, D: int, V: int, K: int, cap: float) -> None:
    x, head, weights = 4 * normal(N, D), normal(V, D, seed=1), torch.tensor(WEIGHTS[K])
    run = lambda x, w: head_loss(x, w, targets(N, V, K), weights, cap)  # noqa: E731
    exact = lambda x, w: formula(x, w, targets(N, V, K), weights.double(), cap)  # noqa: E731
    # In torch a logit is known to a rounding of the largest, too, and its exponential with it.
    in_torch = lambda x, w: formula(x, w, targets(N, V, K), weights, cap)  # noqa: E731
    found, theirs = with_gradients(run, x, head), with_gradients(in_torch, x, head)
    assert_as_close(found, theirs, with_gradients(exact, x.double(), head.double()))


@pytest.mark.parametrize("cap", [0.0, 15.0])
def test_in_bf16(cap: float) -> None:
    """Against float64 of the same bf16 logits: only what is stored is rounded."""
    N, V, K = 5, 4099, 2
    logits, weights = 4 * normal(N, V, dtype=torch.bfloat16), torch.tensor(WEIGHTS[K])
    ours = rows(logits, N, V)
    assert ours.stride(0) % 64 == 0
    ours.copy_(logits)
    count = torch.tensor(N)
    each = losses_in_place(ours, targets(N, V, K), weights, cap, count, True)
    z = logits.double().requires_grad_()
    capped = cap * torch.tanh(z / cap) if cap else z
    lse = capped.logsumexp(1)
    exact = torch.zeros(N, dtype=torch.float64)
    for w, row in zip(weights.tolist(), targets(N, V, K), strict=True):
        exact = exact + torch.where(
            row >= 0, w * (lse - capped.gather(1, row.clamp(min=0)[:, None])[:, 0]), 0.0
        )
    (dz,) = torch.autograd.grad(exact.mean(), z)
    torch.testing.assert_close(each.double(), exact.detach(), rtol=2e-6, atol=0)
    # Every single one to bf16's last place, cut off and not rounded.
    torch.testing.assert_close(ours.double(), dz, rtol=2**-7, atol=1e-9)


def test_a_loss_that_is_only_looked_at_leaves_the_logits() -> None:
    logits = normal(3, 70)
    ours = rows(logits, 3, 70)
    ours.copy_(logits)
    one, count = torch.ones(1), torch.tensor(3)
    looked_at = losses_in_place(ours, targets(3, 70, 1), one, 0.0, count, False)
    assert torch.equal(ours, logits)
    assert torch.equal(looked_at, losses_in_place(ours, targets(3, 70, 1), one, 0.0, count, True))
    assert not torch.equal(ours, logits)


def test_what_stands_beside_the_logits_is_left() -> None:
    """Rows begin at multiples of 64; what fills them up is nobody's."""
    wide = torch.full((3, 128), 7.0)
    ours = wide[:, :70]
    ours.copy_(normal(3, 70))
    losses_in_place(ours, targets(3, 70, 1), torch.ones(1), 0.0, torch.tensor(3), True)
    assert (wide[:, 70:] == 7.0).all()


@pytest.mark.parametrize("cap", [0.0, 15.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_ends_as_in_torch(bad: float, cap: float) -> None:
    x, head, ids = normal(5, 16), normal(50, 16, seed=1), targets(5, 50, 1)
    for spoilt in (x, head):
        good = spoilt[2, 3].item()
        spoilt[2, 3] = bad
        run = lambda x, w: head_loss(x, w, ids, torch.ones(1), cap)  # noqa: E731
        exact = lambda x, w: formula(x, w, ids, torch.ones(1), cap)  # noqa: E731
        found, expected = with_gradients(run, x, head), with_gradients(exact, x, head)
        assert cap or not expected[0].isfinite()
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
        spoilt[2, 3] = good


@pytest.mark.parametrize("lowest", [0, 8192])
def test_logits_of_minus_infinity_are_left_out(lowest: int) -> None:
    """A whole piece of them, the first or a later one, and the rest as if it were alone."""
    logits = normal(1, 16_384)
    ids = torch.tensor([[8192 - lowest + 5]])
    logits[0, lowest : lowest + 8192] = -torch.inf
    exact = torch.nn.functional.cross_entropy(logits.double(), ids[0])
    found = losses_in_place(logits, ids, torch.ones(1), 0.0, torch.tensor(1), True)
    assert found.item() == pytest.approx(exact.item(), rel=1e-6)
    assert (logits[0, lowest : lowest + 8192] == 0).all()


def test_tokens_without_a_target() -> None:
    """They count nowhere, not even if their logits are not finite; without any the mean is NaN."""
    x, head, ids = normal(5, 16), normal(50, 16, seed=1), targets(5, 50, 1)
    ids[0, 2] = -1
    run = lambda x, w: head_loss(x, w, ids, torch.ones(1), 0.0)  # noqa: E731
    kept = torch.tensor([0, 1, 3, 4])
    exact = lambda x, w: formula(x[kept], w, ids[:, kept], torch.ones(1), 0.0)  # noqa: E731
    assert_close(with_gradients(run, x, head), with_gradients(exact, x.double(), head.double()), 64)
    x[2] = torch.nan
    assert head_loss(x, head, ids, torch.ones(1), 0.0).isfinite()
    none = torch.full_like(ids, -1)
    assert head_loss(x, head, none, torch.ones(1), 0.0).isnan()
    assert head_loss(x[:0], head, ids[:, :0], torch.ones(1), 0.0).isnan()
    outside = torch.tensor([[1, 2, 3, 4, 50]])
    assert head_loss(normal(5, 16), head, outside, torch.ones(1), 0.0).isnan()


@pytest.mark.parametrize("learns", ["x", "head"])
def test_one_of_stream_and_head_may_be_frozen(learns: str) -> None:
    x, head, ids = normal(5, 16), normal(50, 16, seed=1), targets(5, 50, 1)
    (x if learns == "x" else head).requires_grad_()
    loss = head_loss(x, head, ids, torch.ones(1), 15.0)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    leaf = x if learns == "x" else head
    assert leaf.grad is not None
    once = leaf.grad.clone()
    (3 * loss).backward()  # type: ignore[no-untyped-call]  # the gradients that the first backward read are still there
    torch.testing.assert_close(leaf.grad, 4 * once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiler_sees_one_operator(dtype: torch.dtype) -> None:
    """In one graph, with the head in fp32 beside a stream in bf16; the bits of the plain call."""
    x, head, ids = normal(2, 4, 16, dtype=dtype), normal(50, 16, seed=1), targets(8, 50, 1)
    with in_the_interpreter():
        run = lambda x, w: dispatched(x, w, ids.view(2, 4), 15.0)  # noqa: E731
        graph = torch.compile(run, backend="aot_eager", fullgraph=True)
        found, expected = with_gradients(graph, x, head), with_gradients(run, x, head)
    assert [a.dtype for a in found] == [torch.float32, dtype, torch.float32]
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    with in_the_interpreter():
        ours = dispatched(x, head, ids.view(2, 4), 15.0)
    theirs = dispatched(x, head, ids.view(2, 4), 15.0)
    torch.testing.assert_close(ours, theirs, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)
