"""Watched decisions: looks against single bets, verdicts by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speedrun.science import bets, sequential
from speedrun.science.sequential import Decision, Interval
from speedrun.science.stats import holm
from tests.science.test_bets import ALPHA, samples, slow_stakes, values

# No two alike: a spread from the second value on, as losses have it.
spread_out = st.lists(values, min_size=2, max_size=14, unique=True)


# Looks


def test_p_values_are_never_0() -> None:
    (look,) = sequential.watch([1.0] * 2000, intervals=False)[-1:]
    assert look.p > 0


@settings(max_examples=60, deadline=None)
@given(samples, st.sampled_from([0.1, 1.0, 3.0]))
def test_a_watch_is_the_separate_functions_at_every_look(
    differences: list[float], margin: float
) -> None:
    looks = sequential.watch(differences, ALPHA, margin)
    assert [look.n for look in looks] == list(range(1, len(differences) + 1))
    for look in looks:
        seen = differences[: look.n]
        slow = [slow_stakes(seen[:k]) for k in range(1, look.n + 1)]
        both = max(1.0, *(sum(stakes) / 2 for stakes in slow), 0.0)
        assert bets.evidence(seen) == pytest.approx(both, rel=1e-6)
        sums = [sum(seen[:k]) for k in range(1, look.n + 1)]
        won = [max(stakes) / 2 for stakes, total in zip(slow, sums, strict=True)
               if (stakes[0] - stakes[1]) * total > 0]  # fmt: skip
        assert look.p == pytest.approx(1 / max([1.0, *won]), rel=1e-6)
        equal = [min(slow_stakes(seen[:k], margin)[1], slow_stakes(seen[:k], -margin)[0])
                 for k in range(6, look.n + 1)]  # fmt: skip  # before there is no interval
        assert look.p_equal == pytest.approx(1 / max([1.0, *equal]), rel=1e-6)
        assert look.mean == pytest.approx(np.mean(seen), abs=1e-12)
        assert look.interval == sequential.confidence_sequence(seen, ALPHA)


@settings(max_examples=60, deadline=None)
@given(samples)
def test_p_values_never_vanish_and_never_grow(differences: list[float]) -> None:
    looks = sequential.watch(differences, ALPHA, margin=0.5)
    for before, after in pairwise(looks):
        assert 0 < after.p <= before.p <= 1
        assert after.p_equal is not None
        assert before.p_equal is not None
        assert 0 < after.p_equal <= before.p_equal <= 1


@settings(max_examples=60, deadline=None)
@given(spread_out, values)
def test_the_interval_holds_the_means_that_no_look_excludes(
    differences: list[float], mean: float
) -> None:
    found = sequential.confidence_sequence(differences, ALPHA)
    excluded = bets.evidence(differences, mean) >= 1 / ALPHA
    if found.low is None or found.high is None:
        assert found == Interval(None, None)
        assert not excluded
    elif found.empty:
        assert excluded
    else:
        # Inside it may be excluded all the same: the ends are the outermost that are not.
        assert excluded or found.low <= mean <= found.high


@settings(max_examples=60, deadline=None)
@given(spread_out, st.sampled_from([0.05, 0.2]))
def test_an_interval_has_a_width_and_holds_the_mean(differences: list[float], alpha: float) -> None:
    found = sequential.confidence_sequence(differences, alpha)
    if found.low is not None and found.high is not None:
        assert found.low < found.high
        assert found.low <= np.mean(differences) + 1e-12
        assert found.high >= np.mean(differences) - 1e-12


@settings(max_examples=60, deadline=None)
@given(samples, st.sampled_from([0.3, 1.0, 2.5]))
def test_equal_is_below_one_margin_and_above_the_other(
    differences: list[float], margin: float
) -> None:
    """At one and the same look."""
    looks = (differences[:n] for n in range(1, len(differences) + 1))
    slow = [min(slow_stakes(seen, margin)[1], slow_stakes(seen, -margin)[0]) for seen in looks]
    expected = max([1.0, *slow])
    assert bets.equality_evidence(differences, margin) == pytest.approx(expected, rel=1e-6)


def test_looks_that_contradict_each_other_leave_an_empty_interval() -> None:
    early = [1.0, 1.01, 0.99, 1.005, 1.002, 0.998, 1.003, 0.995]
    late = [-1.0, -1.01, -0.99] * 30
    assert not sequential.confidence_sequence(early).empty
    found = sequential.confidence_sequence(early + late)
    assert found.empty
    assert found.low is not None
    assert found.high is not None
    assert found.low < float(np.mean(early + late)) <= found.high
    decided = sequential.decide({"a": early, "b": [0.5, 0.4, 0.6]}, margin=None)
    assert decided["a"].verdict == "helps"
    after = sequential.decide({"a": early + late, "b": [0.5, 0.4, 0.6]}, margin=None)
    assert after["a"].verdict == "undecided"
    assert after["a"].note == sequential.CONTRADICTION
    assert after["a"].p is after["a"].p_adjusted is None
    assert sequential.needs_more(after) == ["b"]


# Families


@settings(max_examples=30, deadline=None)
@given(
    st.lists(spread_out, min_size=1, max_size=4),
    st.sampled_from([1e-6, 1e-3, 0.25, 1024.0]),
    st.sampled_from([0.5, None]),
)
def test_the_unit_of_the_loss_changes_nothing(
    rows: list[list[float]], unit: float, margin: float | None
) -> None:
    family = {str(i): differences for i, differences in enumerate(rows)}
    scaled = {name: [unit * d for d in differences] for name, differences in family.items()}
    found = sequential.decide(family, margin=margin)
    other = sequential.decide(scaled, margin=None if margin is None else unit * margin)
    for name, decision in found.items():
        assert other[name].p == pytest.approx(decision.p, rel=1e-6)
        if margin is not None:
            assert other[name].p_equal == pytest.approx(decision.p_equal, rel=1e-6)
        assert other[name].verdict == decision.verdict
        if decision.low is not None and decision.high is not None:
            ends = [unit * decision.low, unit * decision.high]
            assert [other[name].low, other[name].high] == pytest.approx(ends, abs=1e-9 * unit)


@settings(max_examples=30, deadline=None)
@given(st.lists(spread_out, min_size=1, max_size=4))
def test_the_other_sign_is_the_other_verdict(rows: list[list[float]]) -> None:
    turned = {"helps": "hurts", "hurts": "helps", "equal": "equal", "undecided": "undecided"}
    found = sequential.decide({str(i): row for i, row in enumerate(rows)}, margin=1.0)
    other = sequential.decide({str(i): [-d for d in row] for i, row in enumerate(rows)}, margin=1.0)
    for name, decision in found.items():
        assert other[name].verdict == turned[decision.verdict]


def test_verdicts_by_hand() -> None:
    wobble = [0.001, -0.001, 0.0005, -0.0004, 0.0002, -0.0003, 0.0008, -0.0008, 0.0001, 0.0]
    family = {
        "worth it": [0.3 + w for w in wobble],
        "harmful": [-0.3 + w for w in wobble],
        "no matter": wobble,
        "a little": [0.005 + w for w in wobble],
        "noisy": [100 * w for w in wobble],
        "one": [0.3],
        "none": [],
        "diverged": [0.3, 0.301, 0.299, math.nan, 0.3, 0.3, 0.3, 0.3],
    }
    found = sequential.decide(family)
    assert {name: decision.verdict for name, decision in found.items()} == {
        "worth it": "helps",
        "harmful": "hurts",
        "no matter": "equal",
        "a little": "helps",
        "noisy": "undecided",
        "one": "undecided",
        "none": "undecided",
        "diverged": "undecided",
    }
    within = [name for name, decision in found.items() if decision.within_margin]
    assert within == ["no matter", "a little"]
    assert sequential.needs_more(found) == ["noisy", "one", "none"]
    assert found["diverged"].note == "1 of 8 pairs have a run without a loss"
    assert found["diverged"].n == 8
    assert found["diverged"].mean is found["diverged"].p is found["diverged"].low is None
    assert found["one"].p == pytest.approx(1.0), "whatever it is, its sign is a coin"
    assert replace(found["one"], p=1.0) == Decision(
        n=1, mean=0.3, low=None, high=None, low_adjusted=None, high_adjusted=None, p=1.0,
        p_equal=1.0, p_adjusted=1.0, p_equal_adjusted=1.0, within_margin=False, verdict="undecided",
    )  # fmt: skip
    sure = found["worth it"]
    assert sure.low_adjusted is not None
    assert sure.high_adjusted is not None
    assert sure.low is not None
    assert sure.high is not None
    assert sure.low_adjusted <= sure.low < 0.3 < sure.high <= sure.high_adjusted
    alone = sequential.confidence_sequence(family["worth it"], 0.05 / len(family))
    assert (sure.low_adjusted, sure.high_adjusted) == (alone.low, alone.high)


def test_those_that_say_nothing_count_in_the_family() -> None:
    differences = [0.3, 0.31, 0.29, 0.305, 0.302, 0.298, 0.301, 0.299]
    alone = sequential.decide({"a": differences})["a"]
    for filler in ([], [0.1], [math.inf, 0.1]):
        beside = sequential.decide({"a": differences, "b": filler, "c": filler})["a"]
        assert alone.p is not None
        assert beside.p_adjusted == pytest.approx(3 * alone.p)
    assert sequential.decide({}) == {}


def test_a_margin_of_nothing_is_refused() -> None:
    for margin in (0.0, -0.01, math.nan, math.inf):
        with pytest.raises(ValueError, match="margin"):
            sequential.decide({"a": [0.1, 0.2]}, margin=margin)


def test_bit_equal_losses_are_equal() -> None:
    """A switch that does nothing at all has differences of exactly 0."""
    found = sequential.decide({"a": [0.0] * 6})["a"]
    assert (found.verdict, found.p) == ("equal", 1.0)
    assert found.low == pytest.approx(0.0)
    assert found.high == pytest.approx(0.0)


def test_no_verdict_before_signs_could_give_one() -> None:
    """A pair doubles a stake at most, however alike the differences are."""
    assert [bets.fewest_pairs(ALPHA, m) for m in (1, 2, 8, 16)] == [6, 8, 10, 11]
    assert [bets.fewest_pairs(ALPHA, m, equal=True) for m in (1, 8, 16)] == [6, 9, 10]
    for m in (1, 8):
        n = bets.fewest_pairs(ALPHA, m)
        assert m * 2.0 ** (1 - n) <= ALPHA
        others = {str(i): [0.0, 1.0, -1.0] for i in range(m - 1)}
        sure = [1.0 + 0.001 * (i % 3) for i in range(n)]
        assert sequential.decide(others | {"a": sure})["a"].verdict == "helps"
        assert sequential.decide(others | {"a": sure[:-1]})["a"].verdict == "undecided"
        same = bets.fewest_pairs(ALPHA, m, equal=True)
        assert sequential.decide(others | {"a": [0.0] * same})["a"].verdict == "equal"
        assert sequential.decide(others | {"a": [0.0] * (same - 1)})["a"].verdict == "undecided"
    early = sequential.decide({"a": [1.0] * 5})["a"]
    assert (early.low, early.high) == (None, None), "no interval before either"


def test_a_verdict_is_on_the_side_of_the_mean() -> None:
    early = [1.0, 1.2, 0.8, 1.05, 0.9, 1.1, 1.0, 1.0]
    assert sequential.decide({"a": early}, margin=None)["a"].verdict == "helps"
    found = sequential.decide({"a": [*early, -20.0]}, margin=None)["a"]
    assert found.mean is not None
    assert found.mean < 0
    assert found.verdict == "undecided"


def test_the_side_is_that_of_the_bet_that_won() -> None:
    """One difference outweighs all others in the mean, but it is one sign of many."""
    found = sequential.decide({"a": [59.5] + [-1.0] * 57}, margin=None)["a"]
    assert found.mean is not None
    assert found.mean > 0
    assert found.verdict == "undecided"


@pytest.mark.parametrize("row", [[0.0] * 30 + [1.0], [1.0, *[0.0] * 12, -0.5, *[0.0] * 9]])
def test_an_interval_where_most_differences_are_alike(row: list[float]) -> None:
    """Means near those are not excluded, and no two looks contradict each other."""
    found = sequential.confidence_sequence(row)
    assert not found.empty
    assert found.low is None or found.low <= 1e-9
    assert sequential.decide({"a": row}, margin=None)["a"].note == ""


@pytest.mark.filterwarnings("error")
def test_numbers_of_any_size() -> None:
    for unit in (1e-300, 1e-9, 1e9, 1e160, 1e300):
        row = [unit * value for value in (1.0, 1.1, 0.9, 1.2, 1.05, 0.95, 1.0, 1.15)]
        found = sequential.decide({"a": row}, margin=None)["a"]
        assert found.verdict == "helps"
        assert found.low is not None
        assert 0.7 < found.low / unit < 1.06


# Holm's rule with two nulls a switch


def test_without_a_margin_it_is_holms_rule() -> None:
    p = [0.01, None, 0.03, 0.005]
    assert sequential.adjust(p, None) == (holm(p), [None] * 4)


def test_a_switch_counts_until_both_its_nulls_are_rejected() -> None:
    """By hand: the first has both rejected, so the others' nulls are corrected by 2, not 3."""
    effect, equal = sequential.adjust([0.001, 0.02, 0.5], [0.002, 0.9, 0.01])
    assert effect == pytest.approx([0.003, 0.04, 1.0])
    assert equal == pytest.approx([0.006, 1.0, 0.02])


rates = st.floats(1e-4, 1.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(rates, rates), min_size=1, max_size=4))
def test_adjusting_is_closed_testing(pairs: list[tuple[float, float]]) -> None:
    """A null falls with every set of nulls that can be true together and that it belongs to.

    Such a set has at most one null of a switch, and falls at Bonferroni's level for its size.
    """

    def worst(own: float, others: list[tuple[float, float]], size: int) -> float:
        if not others:
            return size * own
        (p, q), rest = others[0], others[1:]
        return max(
            worst(own, rest, size),
            worst(min(own, p), rest, size + 1),
            worst(min(own, q), rest, size + 1),
        )

    found = sequential.adjust([p for p, _ in pairs], [q for _, q in pairs])
    for null in (0, 1):
        for i, pair in enumerate(pairs):
            expected = min(1.0, worst(pair[null], pairs[:i] + pairs[i + 1 :], 1))
            assert found[null][i] == pytest.approx(expected)
