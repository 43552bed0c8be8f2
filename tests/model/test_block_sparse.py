"""Block-sparse attention, native and in torch, against attention over a dense mask."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from speedrun.model import native
from speedrun.model.attention import attend
from speedrun.model.backend import Backend
from speedrun.model.block_sparse import block_sparse_attention
from speedrun.model.mask import WindowUnit
from speedrun.model.plan import plan_layer
from tests.model.documents import documents_of

from . import builds
from .reference import assert_attends, assert_close, by_hand, inputs, no_inductor, with_gradients
from .test_mask import UNITS, documents, pairs, scalar
from .twins import native_only


@pytest.fixture(params=[*builds.HERE_NAMES, "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run once on each build of the native kernels and once on the torch path."""
    if request.param == "torch":
        monkeypatch.setattr(native, "load", lambda: "the test says so")
        yield "torch"
    else:
        with builds.used(request.param):
            yield "native"


heads = st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 1), (3, 3)])


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    documents(),
    st.one_of(st.none(), st.integers(1, 5), st.integers(1, 600)),
    st.sampled_from(UNITS),
    heads,
    st.sampled_from([16, 32, 48, 64, 80, 128]),
    st.sampled_from([0.05, 0.125, 0.3]),
)
def test_blocks_equal_dense(
    path: str,
    documents_BT: Tensor,
    window: int | None,
    unit: WindowUnit,
    heads: tuple[int, int],
    width: int,
    scale: float,
) -> None:
    B, T = documents_BT.shape
    tensors = inputs(B, *heads, T, width)
    seen = pairs(documents_BT, window, unit)
    w = None if window is None else scalar(window)
    backends: tuple[Backend, ...] = ("blocks", "dense")
    for plan in (plan_layer(backend, documents_BT, w, unit) for backend in backends):
        assert_attends(tensors, plan, seen, scale)


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
    plan = plan_layer("blocks", documents_BT, None if window is None else scalar(window))
    seen = pairs(documents_BT, window, "blocks")
    assert_attends(tensors, plan, seen, 0.125)


@pytest.mark.parametrize("width", [16, 48, 64])
def test_an_emulated_arm_equals_dense(width: int) -> None:
    lengths = torch.tensor([70, 1, 1, 63, 64, 6])
    documents_BT = torch.arange(6).repeat_interleave(lengths).int()[None]
    tensors = inputs(1, 2, 1, 205, width)
    seen = pairs(documents_BT, 1, "blocks")
    plan = plan_layer("blocks", documents_BT, scalar(1))
    with builds.used("aarch64"):
        assert_attends(tensors, plan, seen, 0.125)


def test_large_scores_neither_overflow_nor_vanish(path: str) -> None:
    q, k, v, _ = inputs(1, 1, 1, 300, 32)
    documents_BT = torch.zeros(1, 300, dtype=torch.int32)
    out = attend(q, k, v, plan_layer("blocks", documents_BT, None), 30.0)
    expected = by_hand(q, k, v, pairs(documents_BT, None, "blocks"), 30.0)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3, check_dtype=False)


def test_any_layout_gives_the_same_result(path: str) -> None:
    tensors = inputs(2, 4, 2, 200, 32)
    plan = plan_layer("blocks", torch.zeros(2, 200, dtype=torch.int32), scalar(1))
    run = partial(attend, plan=plan, scale=0.2)
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
    plan = plan_layer("blocks", documents_of(torch.arange(1800).view(2, 900) % 211, 0), None)
    run = partial(attend, plan=plan, scale=0.2)
    builds.assert_threads_do_not_matter(lambda: with_gradients(run, tensors))


def test_no_key_acts_on_an_earlier_query_or_another_document(path: str) -> None:
    q, k, v, _ = (x.detach() for x in inputs(1, 2, 2, 400, 32))
    documents_BT = documents_of((torch.arange(400) == 150).long()[None], 1)
    plan = plan_layer("blocks", documents_BT, scalar(2))
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
    op = torch.ops.speedrun.block_sparse_attention.default
    torch.library.opcheck(op, (q, k, v, first_BT, 0.2))


def test_compiled_blocks_equal_dense_with_gradients() -> None:
    """Through inductor, which chooses layouts of its own around the op."""
    if reason := no_inductor():
        pytest.skip(f"NOT TESTED: {reason}")
    documents_BT = documents_of((torch.arange(300) % 90 == 7).long()[None], 1)
    plan, seen = plan_layer("blocks", documents_BT, scalar(2)), pairs(documents_BT, 2, "blocks")

    @torch.compile(fullgraph=True)
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q.sin(), k.cos(), v * 2, plan, 0.2).tanh()

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by_hand(q.sin(), k.cos(), v * 2, seen, 0.2).tanh()

    tensors = inputs(1, 4, 2, 300, 32)
    assert_close(with_gradients(layer, tensors), with_gradients(plain, tensors))


@native_only
@pytest.mark.parametrize("first", [[0, 1, 0], [0, 2, 2], [-1, 0, 0]])
def test_kernel_refuses_ranges_outside_the_row(first: list[int]) -> None:
    q, k, v, _ = inputs(1, 1, 1, 3, 16)
    with pytest.raises(ValueError, match="must not decrease"):
        block_sparse_attention(q, k, v, torch.tensor([first], dtype=torch.int32), 1.0)


@pytest.mark.parametrize("which", [0, 1])
def test_what_is_not_a_number_stays_none(path: str, which: int) -> None:
    """A NaN in a query or a key must reach the loss, where the trainer looks for it."""
    tensors = [x.detach().clone() for x in inputs(1, 1, 1, 300, 32)[:3]]
    tensors[which][0, 0, 150, 3] = torch.nan
    plan = plan_layer("blocks", torch.zeros(1, 300, dtype=torch.int32), None)
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
    out = attend(q, k, v, plan_layer("blocks", documents_BT, None), 1.0)
    assert torch.equal(out[:, :, 40:], torch.ones(1, 1, 40, 16))


def test_masks_of_another_batch_are_refused(path: str) -> None:
    q, k, v, _ = inputs(2, 1, 1, 64, 32)
    mask = plan_layer("blocks", torch.zeros(1, 64, dtype=torch.int32), None)
    with pytest.raises(ValueError, match="one first key per query"):
        attend(q, k, v, mask, 0.2)
