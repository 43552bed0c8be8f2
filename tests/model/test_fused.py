"""Every native pass against its torch twin: values, gradients, bits, graphs, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from speedrun.model import fused, native
from speedrun.model.fused import cross_entropy, relu_squared, rms_norm, rotate
from speedrun.model.gpt import GPT
from speedrun.model.rotary import Rotary

from . import builds
from .builds import NAMES
from .test_gpt import SWITCH_SETS, causal, ids_of, lively


@pytest.fixture(scope="module", params=NAMES)
def _each_build(request: pytest.FixtureRequest) -> Iterator[None]:
    with builds.used(request.param):
        yield


@pytest.fixture
def _this_machine() -> Iterator[None]:
    with builds.used("this machine"):
        yield


every_build = pytest.mark.usefixtures("_each_build")
native_only = pytest.mark.usefixtures("_this_machine")
RECORD_18 = {
    "x0_mixing": True, "unet_skips": True, "softcap": 15.0, "value_embeddings": "mirrored",
    "value_weights": "pair", "positions": "half-rotary",
}  # fmt: skip


@contextmanager
def torch_only() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "load", lambda: "the test says so")
        yield


def with_gradients(run: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """The value and the gradients of all floating inputs, for a fixed random gradient of out."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    out = run(*leaves)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    return out.detach(), *torch.autograd.grad(out, [x for x in leaves if x.requires_grad], g)


def assert_twins(run: Callable[..., Tensor], *inputs: Tensor, floor: float = 0.0) -> None:
    found = with_gradients(run, *inputs)
    with torch_only():
        expected = with_gradients(run, *inputs)
    for a, b in zip(found, expected, strict=True):
        size = b.abs().max().item() if b.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * size + floor)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


quick = settings(max_examples=40, deadline=None)
sizes = st.sampled_from([1e-3, 1.0, 30.0, 1e4])
eps = st.sampled_from([1e-6, 2.0**-7])


@every_build
@quick
@given(st.integers(1, 70), st.integers(2, 400), sizes, eps, st.booleans())
def test_rms_norm(rows: int, width: int, size: float, eps: float, zero_row: bool) -> None:
    x = normal(rows, width) * size
    if zero_row:
        x[rows // 2] = 0
    assert_twins(lambda x: rms_norm(x, eps), x)
    assert_twins(lambda x: rms_norm(x.t(), eps), x.t().contiguous())


@every_build
@quick
@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 40),
    st.sampled_from([16, 20, 32, 48, 64, 80, 96, 128]),
    st.booleans(),
    st.one_of(st.none(), eps),
    st.integers(0, 24),
    sizes,
)
def test_rotate(
    B: int, H: int, T: int, K: int, half: bool, eps: float | None, start: int, size: float
) -> None:
    rotary = Rotary(K, 64, half)
    x_BTHK = normal(B, T, H, K) * size
    x_BTHK[:, 0] = 0
    assert_twins(lambda x: rotary(x.transpose(1, 2), start, eps), x_BTHK)
    # As a part of a fused projection, and with heads outside tokens.
    wide = normal(B, T, 3 * H * K)
    part = slice(H * K, 2 * H * K)
    assert_twins(lambda w: rotary(w[..., part].view(B, T, H, K).transpose(1, 2), start, eps), wide)
    assert_twins(lambda x: rotary(x, start, eps), normal(B, H, T, K))


@native_only
def test_rotate_leaves_what_attention_reads_in_place() -> None:
    """Tokens outside heads in memory: the rotation costs no change of layout after it."""
    rotary = Rotary(32, 16, half=False)
    turned = rotary(normal(2, 16, 3, 32).transpose(1, 2), 0, 1e-6)
    assert turned.transpose(1, 2).is_contiguous()


@every_build
@quick
@given(st.integers(0, 9000), sizes)
def test_relu_squared(count: int, size: float) -> None:
    assert_twins(relu_squared, normal(count) * size)


@every_build
def test_relu_squared_of_values_without_a_square() -> None:
    x = torch.tensor([-torch.inf, -1e30, -0.0, 0.0, 1e-30, 1e30, torch.inf, torch.nan])
    with torch_only():
        expected = relu_squared(x)
    torch.testing.assert_close(relu_squared(x), expected, rtol=0, atol=0, equal_nan=True)


@every_build
@quick
@given(
    st.integers(1, 3),
    st.integers(1, 30),
    st.integers(1, 700),
    st.sampled_from([0.0, 5.0, 15.0, 30.0]),
    st.sampled_from([0.0, 1e-3, 1.0, 20.0, 500.0]),
)
def test_cross_entropy(B: int, T: int, V: int, cap: float, size: float) -> None:
    logits = normal(B, T, V) * size
    targets = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(3))
    # The gradient at a target is p - 1, which fp32 knows to 1e-7 and no better when p is near 1.
    assert_twins(lambda x: cross_entropy(x, targets, cap), logits, floor=1e-6)


@every_build
@pytest.mark.parametrize("cap", [0.0, 15.0, 16.0])
@pytest.mark.parametrize(("V", "size"), [(257, 1e-3), (2048, 4.0), (2048, 60.0), (50_304, 4.0)])
def test_cross_entropy_is_as_exact_as_torch(V: int, size: float, cap: float) -> None:
    """Both in fp32 against float64: the native pass may not err by more than twice as much.

    In the logsumexp and the gradient of every row, and in the mean of the logsumexps, where errors
    that all go one way show. The loss is one number: it may be off by one rounding.
    """
    logits, targets = size * normal(96, V), torch.arange(96) % V
    loss, rows = fused._cross_entropy(logits, targets, cap)
    dlogits = fused._cross_entropy_backward(torch.ones(()), logits, targets, rows, cap)
    lse = rows[:, 0].double() + rows[:, 1].double().log()

    def in_torch(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.requires_grad_()
        z = fused.softcap(x, cap)
        value = torch.nn.functional.cross_entropy(z, targets)
        return value.detach(), z.logsumexp(1).detach(), torch.autograd.grad(value, x)[0]

    exact_loss, exact_lse, exact_gradient = in_torch(logits.double())
    _, torch_lse, torch_gradient = in_torch(logits.clone())
    for ours, theirs, exact in (
        (lse, torch_lse, exact_lse),
        (lse.double().mean(), torch_lse.double().mean(), exact_lse.mean()),
        (dlogits, torch_gradient, exact_gradient),
    ):
        unit = torch.finfo(torch.float32).eps * exact.abs().max().item()
        mine, other = ((x.double() - exact).abs().max().item() for x in (ours, theirs))
        assert mine <= 2 * max(other, unit / 4), (mine, other, unit)
    assert abs(loss.item() - exact_loss.item()) <= torch.finfo(torch.float32).eps * exact_loss


@every_build
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("cap", [0.0, 15.0])
def test_what_is_not_finite_ends_as_in_torch(bad: float, cap: float) -> None:
    logits, targets = normal(1, 3, 50), torch.tensor([[1, 2, 3]])
    logits[0, 1, 7] = bad
    x = normal(4, 40)
    x[2, 5] = bad
    found = cross_entropy(logits, targets, cap), rms_norm(x, 1e-6)
    with torch_only():
        expected = cross_entropy(logits, targets, cap), rms_norm(x, 1e-6)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@every_build
def test_targets_outside_the_vocabulary_are_refused() -> None:
    for target in (-1, 50):
        with pytest.raises(AssertionError, match="an id of the vocabulary"):
            cross_entropy(normal(1, 1, 50), torch.tensor([[target]]), 0.0)


@native_only
def test_targets_in_another_type_are_refused() -> None:
    """Read as they are, they would be other targets."""
    with pytest.raises(AssertionError, match="targets in int64"):
        cross_entropy(normal(1, 3, 50), torch.tensor([[1, 2, 3]], dtype=torch.int32), 0.0)


RUNS: list[tuple[Callable[..., Tensor], list[Tensor]]] = [
    (lambda x: rms_norm(x, 1e-6), [normal(300, 101)]),
    (lambda x: rotate(x, normal(300, 16), normal(300, 16), 1e-6), [normal(1, 3, 300, 32)]),
    (relu_squared, [normal(50_001)]),
    (lambda x: cross_entropy(x, torch.arange(200)[None], 15.0), [normal(1, 200, 501)]),
]


@every_build
@pytest.mark.parametrize(("run", "inputs"), RUNS)
def test_bits_do_not_depend_on_the_number_of_threads(
    run: Callable[..., Tensor], inputs: list[Tensor]
) -> None:
    builds.assert_threads_do_not_matter(lambda: with_gradients(run, *inputs))


@native_only
def test_ops_are_sound() -> None:
    """torch's own checks: schemas, fake tensors, autograd registration, traced gradients."""
    x = normal(2, 5, 3, 16).requires_grad_()
    cos, sin = normal(5, 8), normal(5, 8)
    logits, targets = normal(7, 11).requires_grad_(), torch.arange(7)
    checks: list[tuple[Any, tuple[object, ...]]] = [
        (fused._norm_rotate, (x, cos, sin, 1e-6)),
        (fused._norm_rotate, (x, cos, sin, None)),
        (fused._norm_rotate, (x, None, None, 1e-6)),
        (fused._norm_rotate, (x.transpose(1, 2), None, None, 1e-6)),
        (fused._relu_squared, (x,)),
        (fused._cross_entropy, (logits, targets, 15.0)),
    ]
    for op, arguments in checks:
        torch.library.opcheck(op, arguments)


def loss_and_gradients(run: Callable[..., Tensor], model: GPT) -> tuple[Tensor, ...]:
    loss = run(ids_of(2), causal(2), ids_of(2, seed=1))
    return loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))


@native_only
@pytest.mark.parametrize("switches", [*SWITCH_SETS, RECORD_18])
def test_the_model_computes_the_same_without_a_compiler(switches: dict[str, Any]) -> None:
    model = lively(**switches)
    found = loss_and_gradients(model, model)
    with torch_only():
        expected = loss_and_gradients(model, model)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5 * b.abs().max().item())


@native_only
@pytest.mark.parametrize("switches", [{}, RECORD_18])
def test_a_compiled_model_is_one_graph(switches: dict[str, Any]) -> None:
    model = lively(**switches)
    expected = loss_and_gradients(model, model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = loss_and_gradients(compiled, model)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5 * b.abs().max().item())


def bytes_kept(run: Callable[[], Tensor]) -> int:
    """Bytes of the distinct tensors that autograd keeps for the backward."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = run()
    assert loss.requires_grad
    return sum(kept.values())


@native_only
def test_the_native_passes_keep_less_for_the_backward() -> None:
    model = lively(**RECORD_18)
    ids, targets, plan = ids_of(2), ids_of(2, seed=1), causal(2)
    ours = bytes_kept(lambda: model(ids, plan, targets))
    with torch_only():
        theirs = bytes_kept(lambda: model(ids, plan, targets))
    assert ours < 0.7 * theirs


@native_only
def test_other_precisions_and_devices_keep_to_torch() -> None:
    assert fused.native_for(torch.zeros(1))
    for x in (torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, device="meta")):
        assert not fused.native_for(x)
        assert rms_norm(x, 1e-6).dtype == x.dtype
