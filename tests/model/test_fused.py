"""Every native pass against its torch twin: values, gradients, bits, graphs, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from speedrun.model import fused
from speedrun.model.fused import blend, offset_keys, relu_squared, rms_norm, rotate
from speedrun.model.gpt import GPT
from speedrun.model.rotary import Rotary

from . import builds
from .test_gpt import SWITCH_SETS, causal, ids_of, lively
from .twins import assert_twins, every_build, native_only, normal, torch_only, with_gradients

RECORD_18 = {
    "x0_mixing": True, "unet_skips": True, "softcap": 15.0, "value_embeddings": "mirrored",
    "value_weights": "pair", "positions": "half-rotary",
}  # fmt: skip


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
    angles = Rotary(K, 64, half).angles(start, T)
    x_BTHK = normal(B, T, H, K) * size
    x_BTHK[:, 0] = 0
    assert_twins(lambda x: rotate(x.transpose(1, 2), *angles, eps), x_BTHK)
    # As a part of a fused projection, and with heads outside tokens.
    wide = normal(B, T, 3 * H * K)
    part = slice(H * K, 2 * H * K)
    assert_twins(
        lambda w: rotate(w[..., part].view(B, T, H, K).transpose(1, 2), *angles, eps), wide
    )
    assert_twins(lambda x: rotate(x, *angles, eps), normal(B, H, T, K))


@native_only
def test_rotate_leaves_what_attention_reads_in_place() -> None:
    """Tokens outside heads in memory: the rotation costs no change of layout after it."""
    angles = Rotary(32, 16, half=False).angles(0, 16)
    turned = rotate(normal(2, 16, 3, 32).transpose(1, 2), *angles, 1e-6)
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
@given(st.integers(0, 9000), sizes, st.sampled_from([-2.0, -0.3, 0.0, 0.7, 1.0]))
def test_blend(count: int, size: float, a: float) -> None:
    weights = torch.tensor(a), torch.tensor(0.3)
    # A weight's gradient is a sum whose terms cancel: its error goes with theirs.
    floor = 1e-5 * size * max(1, count) ** 0.5
    assert_twins(blend, normal(count) * size, normal(count, seed=1) * size, *weights, floor=floor)


@every_build
@quick
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 40),
    st.sampled_from([4, 16, 20, 64, 80, 128]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_offset_keys(B: int, G: int, T: int, K: int, share: float) -> None:
    starts = torch.rand(B, T, generator=torch.Generator().manual_seed(2)) < share
    assert_twins(lambda k: offset_keys(k, starts), normal(B, T, G, K))


@every_build
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_ends_as_in_torch(bad: float) -> None:
    x, y = normal(4, 40), normal(4, 40, seed=1)
    x[2, 5] = bad
    weights = torch.tensor(0.5), torch.tensor(0.0)
    starts = torch.tensor([[True, False, False, True]])

    def ends() -> list[Tensor]:
        keys = offset_keys(x.view(1, 4, 2, 20), starts)
        return [rms_norm(x, 1e-6), blend(x, y, *weights), blend(y, x, *weights), keys]

    found = ends()
    with torch_only():
        expected = ends()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


RUNS: list[tuple[Callable[..., Tensor], list[Tensor]]] = [
    (lambda x: rms_norm(x, 1e-6), [normal(300, 101)]),
    (lambda x: rotate(x, normal(300, 16), normal(300, 16), 1e-6), [normal(1, 3, 300, 32)]),
    (relu_squared, [normal(50_001)]),
    (blend, [normal(50_001), normal(50_001, seed=1), torch.tensor(0.7), torch.tensor(0.3)]),
    (lambda x: offset_keys(x, torch.arange(300)[None] % 7 == 0), [normal(1, 300, 3, 32)]),
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
    ops = torch.ops.speedrun
    x = normal(2, 5, 3, 16).requires_grad_()
    cos, sin = normal(5, 8), normal(5, 8)
    weight, starts = torch.tensor(0.3).requires_grad_(), normal(2, 5).sign().relu()
    checks: list[tuple[Any, tuple[object, ...]]] = [
        (ops.norm_rotate, (x, cos, sin, 1e-6)),
        (ops.norm_rotate, (x, cos, sin, None)),
        (ops.norm_rotate, (x, None, None, 1e-6)),
        (ops.norm_rotate, (x.transpose(1, 2), None, None, 1e-6)),
        (ops.relu_squared, (x,)),
        (ops.blend, (x, x.detach(), weight, weight)),
        (ops.offset_keys, (x, starts)),
    ]
    for op, arguments in checks:
        torch.library.opcheck(op.default, arguments)


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
