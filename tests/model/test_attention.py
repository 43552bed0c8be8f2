"""Every backend against attention written out over a dense mask, forward and backward."""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as flex_module

from speedrun.errors import ConfigError
from speedrun.model import blocks, native
from speedrun.model.attention import AttentionPlan, Backend, attend, choose_backend, plan_attention
from speedrun.model.mask import WindowRule, document_ids

from . import builds
from .test_mask import RULES, documents, pairs, scalar

CPU = torch.device("cpu")


@pytest.fixture(params=[*builds.HERE_NAMES, "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run once on each build of the native kernels and once on the torch path."""
    if request.param == "torch":
        monkeypatch.setattr(native, "load", lambda: "the test says so")
        yield "torch"
    else:
        with builds.used(request.param):
            yield "native"


@pytest.fixture
def _this_machine() -> Iterator[None]:
    with builds.used("this machine"):
        yield


native_only = pytest.mark.usefixtures("_this_machine")


def inputs(B: int, H: int, KV: int, T: int, K: int, seed: int = 0) -> list[Tensor]:
    """q, k, v that ask for gradients, heads inside tokens as in the model; a gradient of out."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(B, T, heads, K) for heads in (H, KV, KV, H)]
    parts = [torch.randn(shape, generator=g).transpose(1, 2) for shape in shapes]
    return [x.requires_grad_() for x in parts[:3]] + parts[3:]


def by_hand(q: Tensor, k: Tensor, v: Tensor, seen_BTT: Tensor, scale: float) -> Tensor:
    """softmax over what is seen, in float64."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = (q.double() @ k.mT * scale).masked_fill(~seen_BTT[:, None], -torch.inf)
    return scores.softmax(-1) @ v


def with_gradients(
    run: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: list[Tensor]
) -> tuple[Tensor, ...]:
    q, k, v, dout = tensors
    out = run(q, k, v)
    return out, *torch.autograd.grad(out, (q, k, v), dout.to(out.dtype))


def assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        assert a.shape == b.shape, name
        # Sums cancel, so an entry's error goes with the tensor's largest, not with its own size.
        # Where a query sees itself alone the true gradient is 0, and scores of 10 cancel to 1e-5.
        wrong = (a - b).abs() > 2e-5 * max(5.0, b.abs().max().item()) + 1e-4 * b.abs()
        assert not wrong.any(), f"{name} is off by up to {(a - b).abs().max():.2e}"


heads = st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 1), (3, 3)])


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    documents(),
    st.one_of(st.none(), st.integers(1, 5), st.integers(1, 600)),
    st.sampled_from(RULES),
    heads,
    st.sampled_from([16, 32, 48, 64, 80, 128]),
    st.sampled_from([0.05, 0.125, 0.3]),
)
def test_blocks_equal_dense(
    path: str,
    documents_BT: Tensor,
    window: int | None,
    rule: WindowRule,
    heads: tuple[int, int],
    width: int,
    scale: float,
) -> None:
    B, T = documents_BT.shape
    tensors = inputs(B, *heads, T, width)
    seen = pairs(documents_BT, window, rule)
    expected = with_gradients(lambda q, k, v: by_hand(q, k, v, seen, scale), tensors)
    w = None if window is None else scalar(window)
    backends: tuple[Backend, ...] = ("blocks", "dense")
    for plan in (plan_attention(backend, documents_BT, w, rule) for backend in backends):
        run = partial(attend, plan=plan, scale=scale)
        assert_close(with_gradients(run, tensors), expected)


@pytest.mark.parametrize(
    ("lengths", "window"),
    [
        ([1] * 300, 2),  # one-token documents
        ([1500], 3),  # a document longer than the window
        ([700, 1, 1, 1, 500, 63, 64, 65, 1, 205], 4),
        ([30] * 40 + [1], 4),  # many documents to a tile
        ([257, 1], 1),  # the last block holds two tokens
        ([100, 924], None),
    ],
)
def test_blocks_equal_dense_on_chosen_documents(
    path: str, lengths: list[int], window: int | None
) -> None:
    documents_BT = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).int()[None]
    tensors = inputs(1, 4, 2, sum(lengths), 64)
    plan = plan_attention("blocks", documents_BT, None if window is None else scalar(window))
    seen = pairs(documents_BT, window, "blocks")
    assert_close(
        with_gradients(lambda q, k, v: attend(q, k, v, plan, 0.125), tensors),
        with_gradients(lambda q, k, v: by_hand(q, k, v, seen, 0.125), tensors),
    )


@pytest.mark.parametrize("width", [16, 48, 64])
def test_an_emulated_arm_equals_dense(width: int) -> None:
    documents_BT = (
        torch.arange(6).repeat_interleave(torch.tensor([70, 1, 1, 63, 64, 6])).int()[None]
    )
    tensors = inputs(1, 2, 1, 205, width)
    seen = pairs(documents_BT, 1, "blocks")
    plan = plan_attention("blocks", documents_BT, scalar(1))
    with builds.used("aarch64"):
        found = with_gradients(lambda q, k, v: attend(q, k, v, plan, 0.125), tensors)
    assert_close(found, with_gradients(lambda q, k, v: by_hand(q, k, v, seen, 0.125), tensors))


def test_large_scores_neither_overflow_nor_vanish(path: str) -> None:
    q, k, v, _ = inputs(1, 1, 1, 300, 32)
    documents_BT = torch.zeros(1, 300, dtype=torch.int32)
    out = attend(q, k, v, plan_attention("blocks", documents_BT, None), 30.0)
    expected = by_hand(q, k, v, pairs(documents_BT, None, "blocks"), 30.0)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3, check_dtype=False)


def test_any_layout_gives_the_same_result(path: str) -> None:
    tensors = inputs(2, 4, 2, 200, 32)
    plan = plan_attention("blocks", torch.zeros(2, 200, dtype=torch.int32), scalar(1))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, plan, 0.2)

    plain = with_gradients(run, tensors)
    packed = with_gradients(run, [x.detach().contiguous().requires_grad_() for x in tensors])
    turned = [x.detach().mT.contiguous().mT.requires_grad_() for x in tensors]
    assert turned[0].stride(3) != 1
    for other in (packed, with_gradients(run, turned)):
        if path == "native":
            assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))
        else:  # a BLAS may sum in another order for another layout
            assert_close(other, plain)


def test_bits_do_not_depend_on_the_number_of_threads(path: str) -> None:
    if path == "torch":
        pytest.skip("torch makes no such promise")
    tensors = inputs(2, 4, 2, 900, 32)
    plan = plan_attention("blocks", document_ids(torch.arange(1800).view(2, 900) % 211, 0), None)
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(with_gradients(lambda q, k, v: attend(q, k, v, plan, 0.2), tensors))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_no_key_acts_on_an_earlier_query_or_another_document(path: str) -> None:
    q, k, v, _ = (x.detach() for x in inputs(1, 2, 2, 400, 32))
    documents_BT = document_ids((torch.arange(400) == 150).long()[None], 1)
    plan = plan_attention("blocks", documents_BT, scalar(2))
    before = attend(q, k, v, plan, 0.2)
    k[:, :, 200] += 5
    v[:, :, 200] += 5
    changed = (attend(q, k, v, plan, 0.2) != before).any(3).any(1)[0].nonzero().flatten()
    # Key 200 lies in block 1; with a window of two blocks the queries up to block 2 see it.
    assert changed.tolist() == list(range(200, 384))
    k[:, :, 100] += 5
    changed = (attend(q, k, v, plan, 0.2) != before).any(3).any(1)[0].nonzero().flatten()
    assert changed.tolist() == list(range(100, 150)) + list(range(200, 384))


def test_op_keeps_its_promises_to_the_compiler(path: str) -> None:
    q, k, v, _ = inputs(1, 2, 1, 40, 16)
    first_BT = torch.zeros(1, 40, dtype=torch.int32)
    torch.library.opcheck(blocks.blocks, (q, k, v, first_BT, 0.2))


@pytest.mark.parametrize("inside", [True, False], ids=["plan_inside", "plan_outside"])
@pytest.mark.parametrize("backend", ["blocks", "flex", "dense"])
def test_a_whole_window_schedule_compiles_once(backend: Backend, inside: bool) -> None:
    """One graph without breaks, and no second one while window and documents change."""
    T = 512
    trains = backend != "flex"  # FlexAttention has no backward on CPU

    def layer(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        return attend(q * 2, k, v, plan, 0.2)

    def model(q: Tensor, k: Tensor, v: Tensor, documents_BT: Tensor, window: Tensor) -> Tensor:
        plan = plan_attention(backend, documents_BT, window)
        return layer(layer(q, k, v, plan), k, v, plan)

    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled_model = torch.compile(model, backend=graphs, fullgraph=True)
    compiled_layer = torch.compile(layer, backend=graphs, fullgraph=True)
    q, k, v, dout = (x.detach().requires_grad_(trains) for x in inputs(1, 2, 1, T, 16))
    window = scalar(1)
    for w in range(1, 7):
        window.fill_(w)
        documents_BT = document_ids((torch.arange(T) % (50 * w) == 7).long()[None], 1)
        seen = pairs(documents_BT, w, "blocks")
        expected = by_hand(by_hand(q, k, v, seen, 0.4).float(), k, v, seen, 0.4)
        if inside:
            out = compiled_model(q, k, v, documents_BT, window)
        else:
            plan = plan_attention(backend, documents_BT, window)
            out = compiled_layer(compiled_layer(q, k, v, plan), k, v, plan)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5, check_dtype=False)
        if trains:
            torch.autograd.grad(out, (q, k, v), dout)
    # A layer's second call gets an input in another layout: two graphs at most, made in round one.
    assert graphs.frame_count <= (1 if inside else 2)


@functools.cache
def no_inductor() -> str:
    """Why torch's compiler cannot build for this CPU: it needs a compiler and Python's headers."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8))
    except Exception as error:  # of many kinds, wrapped
        return f"inductor builds nothing here: {str(error).splitlines()[0]}"
    return ""


def test_compiled_blocks_equal_dense_with_gradients() -> None:
    """Through inductor, which chooses layouts of its own around the op."""
    if reason := no_inductor():
        pytest.skip(reason)
    documents_BT = document_ids((torch.arange(300) % 90 == 7).long()[None], 1)
    plan, seen = plan_attention("blocks", documents_BT, scalar(2)), pairs(documents_BT, 2, "blocks")

    @torch.compile(fullgraph=True)
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q.sin(), k.cos(), v * 2, plan, 0.2).tanh()

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by_hand(q.sin(), k.cos(), v * 2, seen, 0.2).tanh()

    tensors = inputs(1, 4, 2, 300, 32)
    assert_close(with_gradients(layer, tensors), with_gradients(plain, tensors))


def test_flex_forward_equals_dense() -> None:
    """The compiled kernel, which trusts the block lists and masks partial blocks only."""
    if reason := no_inductor():
        pytest.skip(reason)
    if not torch.cpu._is_avx2_supported():
        pytest.skip("torch has this kernel for CPUs with AVX2 alone")
    T = 428  # the last block is 44 tokens long
    opens = torch.stack([torch.arange(T) == 10, torch.arange(T) % 90 == 7])
    documents_BT = document_ids(opens.long(), 1)
    q, k, v, _ = (x.detach() for x in inputs(2, 2, 1, T, 32))
    plan = plan_attention("flex", documents_BT, scalar(2))
    assert isinstance(plan.mask, flex_module.BlockMask)
    assert plan.mask.full_kv_num_blocks is not None
    assert plan.mask.full_kv_num_blocks[:, 0].tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    out = attend(q, k, v, plan, 0.2)
    expected = by_hand(q, k, v, pairs(documents_BT, 2, "blocks"), 0.2)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5, check_dtype=False)


@pytest.mark.parametrize("rule", RULES)
def test_flex_backward_equals_dense(rule: WindowRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's eager arithmetic, its refusal to differentiate on CPU lifted."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    documents_BT = document_ids((torch.arange(384) % 170 == 7).long()[None], 1)
    window = 2 if rule == "blocks" else 150
    plan = plan_attention("flex", documents_BT, scalar(window), rule)
    assert isinstance(plan.mask, flex_module.BlockMask)
    tensors, mask = inputs(1, 2, 1, 384, 32), plan.mask
    seen = pairs(documents_BT, window, rule)

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flex_module.flex_attention(q, k, v, block_mask=mask, scale=0.2, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out

    assert_close(
        with_gradients(eager, tensors),
        with_gradients(lambda q, k, v: by_hand(q, k, v, seen, 0.2), tensors),
    )


def test_backends_are_chosen_by_device_and_say_why() -> None:
    assert choose_backend(torch.device("cuda", 0), tokens=65_536, head_dim=128)[0] == "flex"
    name, reason = choose_backend(CPU, tokens=65_536, head_dim=64)
    assert name == "blocks"
    assert reason.startswith("chosen for cpu: ")
    assert choose_backend(CPU, "dense", tokens=512, head_dim=64)[1].startswith("asked for: ")
    assert "head dim 20" in choose_backend(CPU, tokens=512, head_dim=20)[1]


@pytest.mark.parametrize(
    ("device", "requested", "tokens", "dtype", "complaint"),
    [
        ("cpu", "flash", 512, torch.float32, "'flash' is unknown"),
        ("cpu", "flex", 512, torch.float32, "'flex' has no backward on cpu; use 'blocks'"),
        ("cuda", "blocks", 512, torch.bfloat16, "'blocks' runs on cpu only; use 'flex'"),
        ("cpu", "blocks", 512, torch.bfloat16, "computes in torch.float32, not torch.bfloat16"),
        ("cpu", "dense", 8192, torch.float32, "at most 4096 tokens, not 8192"),
    ],
)
def test_a_backend_refuses_what_it_cannot_do(
    device: str, requested: str, tokens: int, dtype: torch.dtype, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        choose_backend(torch.device(device), requested, tokens=tokens, head_dim=64, dtype=dtype)


@pytest.mark.parametrize(
    ("variable", "value", "complaint"),
    [
        ("CXX", "no-such-compiler", "no C++ compiler (no-such-compiler) is found"),
        ("CXX", "false", "cannot build attention.cpp"),
        (native.SWITCH, "0", "SPEEDRUN_NATIVE=0 is set"),
    ],
)
def test_without_a_kernel_torch_takes_over(
    variable: str, value: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path))
    for name in (native.SWITCH, "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(native, "load", native.load.__wrapped__)
    _, reason = choose_backend(CPU, tokens=512, head_dim=64)
    assert "torch's CPU flash attention" in reason
    assert complaint in reason


@native_only
@pytest.mark.parametrize("first", [[0, 1, 0], [0, 2, 2], [-1, 0, 0]])
def test_kernel_refuses_ranges_outside_the_row(first: list[int]) -> None:
    q, k, v, _ = inputs(1, 1, 1, 3, 16)
    with pytest.raises(AssertionError, match="must not decrease"):
        blocks.blocks(q, k, v, torch.tensor([first], dtype=torch.int32), 1.0)


@pytest.mark.parametrize("which", [0, 1])
def test_what_is_not_a_number_stays_none(path: str, which: int) -> None:
    """A NaN in a query or a key must reach the loss, where the trainer looks for it."""
    tensors = [x.detach().clone() for x in inputs(1, 1, 1, 300, 32)[:3]]
    tensors[which][0, 0, 150, 3] = torch.nan
    plan = plan_attention("blocks", torch.zeros(1, 300, dtype=torch.int32), None)
    q, k, v = tensors
    out = attend(q, k, v, plan, 0.2)
    seen = out[0, 0].isnan().any(-1)
    assert seen[150]
    assert seen[151:].all() == (which == 1)


@pytest.mark.parametrize("score", [-1e31, -1e38])
def test_what_is_hidden_stays_hidden_from_the_least_scores(path: str, score: float) -> None:
    """Queries of the second document see nothing of the first, however little they see."""
    q, k, v = (torch.zeros(1, 1, 80, 16) for _ in range(3))
    q[..., 0], k[..., 0] = 1.0, score
    v[:, :, :40] = 7.0
    v[:, :, 40:] = 1.0
    documents_BT = torch.arange(2, dtype=torch.int32).repeat_interleave(40)[None]
    out = attend(q, k, v, plan_attention("blocks", documents_BT, None), 1.0)
    assert torch.equal(out[:, :, 40:], torch.ones(1, 1, 40, 16))


def test_masks_of_another_batch_are_refused(path: str) -> None:
    q, k, v, _ = inputs(2, 1, 1, 64, 32)
    mask = plan_attention("blocks", torch.zeros(1, 64, dtype=torch.int32), None)
    with pytest.raises(AssertionError, match="one first key per query"):
        attend(q, k, v, mask, 0.2)
