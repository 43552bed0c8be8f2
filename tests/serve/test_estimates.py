from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from speedrun.serve.estimates import (
    difference_of_ratios,
    difference_of_shares,
    ratio_of_totals,
    wilson,
)

DOCUMENTS = st.lists(
    st.tuples(st.floats(0.1, 10.0), st.floats(0.1, 10.0), st.integers(1, 500)),
    min_size=2, max_size=30,
)  # fmt: skip


@given(DOCUMENTS)
def test_the_error_of_a_ratio_is_that_of_its_documents(
    documents: list[tuple[float, float, int]],
) -> None:
    """Against the formula of the documentation, written out."""
    w = [size for _, _, size in documents]
    x = [loss * size for loss, _, size in documents]
    n, r = len(x), sum(x) / sum(w)
    found = ratio_of_totals(x, w)
    squares = sum((a - r * b) ** 2 for a, b in zip(x, w, strict=True))
    stderr = math.sqrt(n / (n - 1) * squares) / sum(w)
    assert found.value == pytest.approx(r)
    assert found.stderr == pytest.approx(stderr, rel=1e-6, abs=1e-9)
    assert found.interval is not None
    low, high = found.interval
    assert low < r < high
    half = float(scipy_stats.t.ppf(0.975, n - 1)) * stderr
    assert (high - low) / 2 == pytest.approx(half, rel=1e-3, abs=1e-5)


@given(DOCUMENTS)
def test_the_difference_of_a_pair_is_the_ratio_of_differences(
    documents: list[tuple[float, float, int]],
) -> None:
    w = [size for _, _, size in documents]
    first, second = ([row[i] * row[2] for row in documents] for i in (0, 1))
    found = difference_of_ratios(second, first, w)
    same = ratio_of_totals([b - a for a, b in zip(first, second, strict=True)], w)
    assert found.value == pytest.approx(same.value, abs=1e-9)
    assert found.stderr == pytest.approx(same.stderr, rel=1e-6, abs=1e-9)
    assume(same.stderr is not None and same.stderr > 1e-3)
    assert same.stderr is not None
    t = abs(same.value) / same.stderr
    p = 2 * float(scipy_stats.t.sf(t, len(w) - 1))
    assert found.p == pytest.approx(p, rel=1e-2, abs=1e-9)
    assert found.told_apart == (found.p is not None and found.p < 0.05)


def test_equal_losses_are_not_told_apart_and_leave_a_width() -> None:
    found = difference_of_ratios([2.0, 6.0], [2.0, 6.0], [1, 3])
    assert (found.value, found.stderr, found.p) == (0, 0, 1)
    assert found.interval is not None
    assert found.interval[0] < 0 < found.interval[1]


def test_one_document_has_no_error() -> None:
    found = ratio_of_totals([3.0], [2])
    assert (found.value, found.stderr, found.interval) == (1.5, None, None)
    pair = difference_of_ratios([3.0], [2.0], [2])
    assert (pair.value, pair.stderr, pair.p, pair.told_apart) == (0.5, None, None, False)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Documents of unequal length whose loss goes with it: a mean of means would be off."""
    source = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        w = source.integers(50, 150, 40)
        x = w * (2.0 + 0.004 * (w - 100) + 0.3 * source.standard_normal(40))
        found = ratio_of_totals(x.tolist(), w.tolist())
        assert found.interval is not None
        # E[w (2 + 0.004 (w - 100))] / E[w] for w even over 50 .. 149
        every = np.arange(50, 150)
        truth = (every * (2.0 + 0.004 * (every - 100))).mean() / every.mean()
        held += found.interval[0] < truth < found.interval[1]
    assert 0.92 < held / 400 < 0.98


def test_wilsons_interval() -> None:
    """Values of the literature, and that no share leaves an interval without a width."""
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    low, high = wilson(1, 1)
    assert 0 < low < high == 1


def test_answers_of_two_runs_are_compared_item_by_item() -> None:
    found = difference_of_shares(8, 1, 40)
    assert found.value == 7 / 40
    assert found.p == pytest.approx(2 * (1 + 9) / 2**9)  # at most 1 of 9, either way
    assert found.interval is not None
    gained, lost = 9 / 42, 2 / 42
    half = 1.959964 * math.sqrt((gained + lost - (gained - lost) ** 2) / 42)
    assert found.interval == pytest.approx((gained - lost - half, gained - lost + half))
    same = difference_of_shares(0, 0, 40)
    assert (same.value, same.p) == (0, 1)
    assert same.interval is not None
    assert same.interval[0] < 0 < same.interval[1]
    assert difference_of_shares(3, 3, 10).p == 1
