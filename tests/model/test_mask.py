"""Masks against their conditions pair by pair, and against FlexAttention's own builder."""

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from speedrun.bench.attention import mixed_documents
from speedrun.bench.mask import library_mask, same_blocks
from speedrun.config.architecture import BLOCK
from speedrun.model.mask import WindowUnit, block_lists, dense_mask, first_key
from speedrun.model.plan import flex_mask

UNITS: tuple[WindowUnit, ...] = ("blocks", "tokens", "tokens_in_blocks")


def scalar(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int32)


def pairs(documents_BT: Tensor, window: int | None, unit: WindowUnit) -> Tensor:
    """The reference: every pair asked in plain integers."""
    B, T = documents_BT.shape
    q, k = torch.arange(T).view(-1, 1), torch.arange(T).view(1, -1)
    seen = (q >= k).repeat(B, 1, 1)
    seen &= documents_BT.view(B, T, 1) == documents_BT.view(B, 1, T)
    if window is not None:
        if unit in ("tokens", "tokens_in_blocks"):
            seen &= q - k < window
        if unit == "blocks":
            seen &= q // 128 - k // 128 < window
        if unit == "tokens_in_blocks":
            seen &= q // 128 - k // 128 < -(-window // 128)
    return seen


@st.composite
def documents(draw: st.DrawFn, most: int = 600) -> Tensor:
    """Rows cut into documents of any length, one token included."""
    T = draw(st.integers(1, most))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        scale = draw(st.sampled_from([1, 3, 40, 200, 1000]))
        lengths = draw(st.lists(st.integers(1, scale), min_size=1, max_size=T))
        row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[:T]
        tail = row[-1].repeat(T - len(row))  # what is left over belongs to the last document
        rows.append(torch.cat([row, tail]))
    return torch.stack(rows).to(torch.int32)


windows = st.one_of(st.none(), st.integers(1, 6), st.integers(1, 700))


@settings(max_examples=60, deadline=None)
@given(documents(), windows, st.sampled_from(UNITS))
def test_first_key_and_dense_mask_say_the_same(
    documents_BT: Tensor, window: int | None, unit: WindowUnit
) -> None:
    w = None if window is None else scalar(window)
    expected = pairs(documents_BT, window, unit)
    assert torch.equal(dense_mask(documents_BT, w, unit), expected)
    first_BT = first_key(documents_BT, w, unit)
    t_T = torch.arange(documents_BT.shape[1])
    assert first_BT.dtype == torch.int32
    assert torch.equal((t_T >= first_BT[..., None]) & (t_T <= t_T[:, None]), expected)


@settings(max_examples=60, deadline=None)
@given(documents(), windows, st.sampled_from(UNITS))
def test_block_lists_rebuild_the_dense_mask(
    documents_BT: Tensor, window: int | None, unit: WindowUnit
) -> None:
    expected = pairs(documents_BT, window, unit)
    lists = block_lists(first_key(documents_BT, None if window is None else scalar(window), unit))
    T = documents_BT.shape[1]
    n = -(-T // BLOCK)
    assert lists.partial_index.shape == lists.full_index.shape == (len(documents_BT), n, n)
    for b, allowed in enumerate(expected):
        for Q in range(n):
            full = lists.full_index[b, Q, : int(lists.full_count[b, Q])].tolist()
            partial = lists.partial_index[b, Q, : int(lists.partial_count[b, Q])].tolist()
            for K in range(n):
                tile = allowed[Q * BLOCK : (Q + 1) * BLOCK, K * BLOCK : (K + 1) * BLOCK]
                if K in full:
                    assert tile.all()
                    assert K not in partial
                else:
                    # The diagonal is partial always, even of a last block one token long.
                    assert (K in partial) == bool(tile.any())
                    assert K == Q or not tile.all()
            assert len(set(full)) == len(full)
            assert len(set(partial)) == len(partial)
    if window == 1 and unit == "blocks":
        assert not lists.full_count.any()


@settings(max_examples=40, deadline=None)
@given(documents(), windows, st.sampled_from(UNITS))
def test_without_full_blocks_the_same_ones_are_all_partial(
    documents_BT: Tensor, window: int | None, unit: WindowUnit
) -> None:
    first_BT = first_key(documents_BT, None if window is None else scalar(window), unit)
    lists, found = block_lists(first_BT), block_lists(first_BT, full=False)
    assert not found.full_count.any()
    assert torch.equal(found.partial_count, lists.partial_count + lists.full_count)
    for b, Q in itertools.product(*map(range, lists.full_count.shape)):
        full = lists.full_index[b, Q, : int(lists.full_count[b, Q])].tolist()
        partial = lists.partial_index[b, Q, : int(lists.partial_count[b, Q])].tolist()
        every = found.partial_index[b, Q, : int(found.partial_count[b, Q])].tolist()
        assert sorted(every) == sorted(full + partial)


@settings(max_examples=40, deadline=None)
@given(documents(), st.integers(1, 6))
def test_block_lists_follow_the_first_and_last_document_of_each_block(
    documents_BT: Tensor, w: int
) -> None:
    documents_BT = documents_BT.repeat_interleave(BLOCK // 4, 1)
    documents_BT = documents_BT[:, : documents_BT.shape[1] // BLOCK * BLOCK]
    assume(documents_BT.shape[1] > 0)
    lists = block_lists(first_key(documents_BT, scalar(w)))
    lo, hi = documents_BT[:, ::BLOCK], documents_BT[:, BLOCK - 1 :: BLOCK]
    Q = torch.arange(lo.shape[1])[:, None]
    K = torch.arange(lo.shape[1])
    near = (Q >= K) & (w > Q - K)
    seen = near & (lo[:, :, None] <= hi[:, None]) & (lo[:, None] <= hi[:, :, None])
    full = near & (Q > K) & (lo[:, :, None] == hi[:, None]) & (lo[:, None] == hi[:, :, None])
    assert torch.equal(lists.full_count, full.sum(-1).int())
    assert torch.equal(lists.partial_count, (seen & ~full).sum(-1).int())


def test_one_block_of_window_has_no_full_blocks() -> None:
    lists = block_lists(first_key(torch.zeros(1, 1024, dtype=torch.int32), scalar(1)))
    assert lists.full_count.sum() == 0
    assert lists.partial_count.tolist() == [[1] * 8]


def test_block_mask_equals_the_librarys() -> None:
    documents_BT = torch.cat([mixed_documents(2048), mixed_documents(2048, seed=1)])
    for w in (1, 3, 9):
        ours = flex_mask(first_key(documents_BT, scalar(w)))
        assert same_blocks(ours, library_mask(documents_BT, scalar(w)))
    assert not same_blocks(ours, library_mask(documents_BT, scalar(1)))


@pytest.mark.parametrize(
    ("window", "least", "most", "mean"), [(64, 1, 64, 48.25), (1792, 1665, 1792, 1728.5)]
)
def test_tokens_in_blocks_loses_the_farthest_block(
    window: int, least: int, most: int, mean: float
) -> None:
    """The known view of record 15, per offset in a block far from the start of the row."""
    T = 4096
    first_BT = first_key(torch.zeros(1, T, dtype=torch.int32), scalar(window), "tokens_in_blocks")
    seen = (torch.arange(T) - first_BT[0] + 1)[-BLOCK:].tolist()
    assert (min(seen), max(seen), sum(seen) / BLOCK) == (least, most, mean)
