"""Bets on signs: against single bets, and fair for every row of signs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from speedrun.science import bets

ALPHA = 0.05

# Not st.floats: tests that train switch subnormal numbers off, which it takes amiss.
values = st.integers(-2_000_000, 2_000_000).map(lambda value: value / 1e6)
samples = st.lists(values, min_size=2, max_size=14)


def slow_stakes(differences: Sequence[float], mean: float = 0.0) -> tuple[float, float]:
    """On "above" and on "below" after all of them, bet by bet."""
    sums = [0.0, 0.0]
    for factor in (0.5, 0.5**0.5, 1.0, 2**0.5, 2.0, 8**0.5, 4.0):
        stakes, squares = [1.0, 1.0], 0.0
        for n, value in enumerate(differences, start=1):
            squares += (value - mean) ** 2
            bet = factor * (value - mean) / math.sqrt(squares / n) if squares else 0.0
            stakes = [stakes[0] * math.exp(bet) / math.cosh(bet),
                      stakes[1] * math.exp(-bet) / math.cosh(bet)]  # fmt: skip
        sums = [one + stake / 7 for one, stake in zip(sums, stakes, strict=True)]
    return sums[0], sums[1]


@settings(max_examples=60, deadline=None)
@given(samples, values)
def test_stakes_are_those_of_single_bets(differences: list[float], mean: float) -> None:
    above, below = bets.log_stakes(differences, mean)
    both = bets.log_stake(differences, mean)
    for n in range(1, len(differences) + 1):
        slow = slow_stakes(differences[:n], mean)
        assert math.exp(above[n - 1]) == pytest.approx(slow[0], rel=1e-6)
        assert math.exp(below[n - 1]) == pytest.approx(slow[1], rel=1e-6)
        assert math.exp(both[n - 1]) == pytest.approx(sum(slow) / 2, rel=1e-6)


def signs(n: int) -> NDArray[np.float64]:
    """All 2^n rows of n signs."""
    return np.array(list(product((-1.0, 1.0), repeat=n)))


sizes = st.lists(st.integers(0, 1_000_000).map(lambda size: (size / 1e6) ** 3), min_size=1,
                 max_size=9)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_a_bet_is_fair_whatever_the_sizes_of_the_differences(sizes: list[float]) -> None:
    """Exactly: every sign is as likely as its opposite, so all rows of signs are alike likely."""
    rows = signs(len(sizes)) * sizes
    stakes = np.exp(bets.log_stake(rows))
    assert stakes.mean(axis=0) == pytest.approx(np.ones(len(sizes)))
    for alpha in (0.5, 0.1, ALPHA):
        assert (stakes.max(axis=1) >= 1 / alpha).mean() <= alpha


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(0, 1500).map(lambda mean: mean / 1000))
def test_a_bet_on_below_loses_where_the_mean_is_above(sizes: list[float], mean: float) -> None:
    """Differences alike on both sides of a mean above 0, and bets that they are below 0."""
    below = bets.log_stakes(mean + signs(len(sizes)) * sizes)[1]
    assert np.exp(below).mean(axis=0).max() <= 1 + 1e-9


@pytest.mark.parametrize("switches", [1, 2, 8, 16, 32])
def test_two_clusters_keep_the_level(switches: int) -> None:
    """Exactly, for differences of 1 and -1: the chance that a stake is reached in 200 looks."""
    wanted = math.log(switches / ALPHA)
    ways = {0: 1.0}  # by how many are above: the chance to be there and not to have reached it
    reached = 0.0
    for n in range(1, 201):
        after: dict[int, float] = {}
        for above, chance in ways.items():
            for step in (0, 1):
                after[above + step] = after.get(above + step, 0.0) + chance / 2
        ways = {}
        for above, chance in after.items():
            # The order makes no difference to a stake of differences of one size.
            stake = bets.log_stake([1.0] * above + [-1.0] * (n - above))[-1]
            if stake >= wanted:
                reached += chance
            else:
                ways[above] = chance
    assert 0.3 * ALPHA < switches * reached <= ALPHA


def test_stakes_begin_at_one_and_stay_finite() -> None:
    assert bets.evidence([]) == 1.0
    assert bets.evidence([7.0]) == pytest.approx(1.0)
    assert bets.log_stake([1.0] * 2000)[-1] == bets.LARGEST_LOG
    assert np.isfinite(bets.log_stake([1e300, 1e-300, -1e300] * 7)).all()
    assert np.isfinite(bets.log_stake([0.0, 0.0, 0.0])).all()


def test_a_value_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="difference 2 is nan"):
        bets.evidence([0.1, math.nan])


def test_an_interval_ends_where_the_stake_is_reached() -> None:
    """Of one look: a little inside the outermost means are not excluded, and from the ends on."""
    rng = np.random.default_rng(3)
    for n in (6, 9, 20):
        for row in rng.normal(0.3, 1.0, size=(20, n)).tolist():
            found = bets.not_excluded(tuple(row), ALPHA)
            if found is None:
                continue
            low, high = found
            inside = 1e-6 * (high - low)
            for end, step in ((low, inside), (high, -inside)):
                assert math.exp(bets.log_stake(row, end)[-1]) >= 1 / ALPHA * (1 - 1e-6)
                assert math.exp(bets.log_stake(row, end + step)[-1]) < 1 / ALPHA * (1 + 1e-3)
