"""Each statistic against scipy, or against many simulated experiments where scipy has none."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats as reference

from speedrun.science import stats

samples = st.lists(st.floats(2.0, 5.0), min_size=2, max_size=12).filter(
    lambda values: np.std(values) > 1e-6
)


@settings(max_examples=40, deadline=None)
@given(samples)
def test_summary_is_the_t_interval(values: list[float]) -> None:
    found = stats.summarize(values)
    low, high = reference.t.interval(
        0.95, len(values) - 1, loc=np.mean(values), scale=reference.sem(values)
    )
    assert found.n == len(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.std == pytest.approx(np.std(values, ddof=1))
    assert [found.low, found.high] == pytest.approx([low, high])


def test_one_value_has_a_mean_and_nothing_else() -> None:
    assert stats.summarize([3.2]) == stats.Sample(1, 3.2, None, None, None)


def test_equal_values_have_no_spread_to_the_last_bit() -> None:
    values = [0.1] * 3  # their sum over three is not 0.1
    assert stats.std(values) == 0.0


@settings(max_examples=40, deadline=None)
@given(samples, st.floats(2.0, 5.0))
def test_below_target_is_scipys_one_sided_test(values: list[float], target: float) -> None:
    t, p = stats.below_target(len(values), fmean(values), stats.std(values), target)
    expected = reference.ttest_1samp(values, target, alternative="less")
    assert t == pytest.approx(expected.statistic, rel=1e-6, abs=1e-9)
    assert p == pytest.approx(expected.pvalue, rel=1e-5, abs=1e-12)


def test_known_sigma_is_a_z_test() -> None:
    z, p = stats.below_target_known_sigma(4, 3.278, 0.0013, 3.28)
    assert z == pytest.approx(-0.002 / (0.0013 / 2))
    assert p == pytest.approx(reference.norm.cdf(-0.004 / 0.0013))


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize(("n", "cv"), [(3, 0.05), (3, 0.3), (5, 0.1)])
def test_ratio_interval_covers_the_truth_as_often_as_it_says(
    n: int, cv: float, paired: bool
) -> None:
    """4000 experiments with a true ratio of 0.5; the standard error of the coverage is 0.35%.

    Paired Fieller is exact. Unpaired it inherits Welch's approximation, known to run a little high
    with three values a side.
    """
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(4000):
        common = rng.normal(size=n) if paired else np.zeros(n)
        top = 50 * (1 + cv * (0.6 * common + 0.8 * rng.normal(size=n)))
        bottom = 100 * (1 + cv * (0.6 * common + 0.8 * rng.normal(size=n)))
        found = stats.ratio_of_means(top.tolist(), bottom.tolist(), paired=paired)
        if found.low is None or found.high is None:
            covered += 1  # unbounded: the truth is inside
        else:
            covered += found.low <= 0.5 <= found.high
    low, high = (0.938, 0.962) if paired else (0.935, 0.985)
    assert low < covered / 4000 < high


def test_ratio_ends_are_where_the_t_test_turns() -> None:
    """Fieller's ends by definition: there the test of `top = r bottom` has p = 0.05."""
    top, bottom = [40.0, 43.0, 41.5, 44.0], [80.0, 85.0, 79.0, 88.0]
    found = stats.ratio_of_means(top, bottom, paired=True)
    for end in (found.low, found.high):
        assert end is not None
        gaps = [a - end * b for a, b in zip(top, bottom, strict=True)]
        assert reference.ttest_1samp(gaps, 0.0).pvalue == pytest.approx(0.05)


def test_ratio_without_a_bounded_interval() -> None:
    assert stats.ratio_of_means([1.0], [2.0]) == stats.Ratio(0.5, None, None)
    assert stats.ratio_of_means([1.0, 2.0], [-1.0, 1.1]).low is None
    found = stats.ratio_of_means([1.0, 1.0], [2.0, 2.0])
    assert [found.low, found.high] == pytest.approx([0.5, 0.5])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(2, 5), st.floats(2, 5)), min_size=2, max_size=9))
def test_paired_difference_is_scipys_paired_test(pairs: list[tuple[float, float]]) -> None:
    treated, control = [a for a, _ in pairs], [b for _, b in pairs]
    gaps = np.subtract(treated, control)
    assume(np.std(gaps) >= 1e-6)
    found = stats.paired_difference(treated, control)
    expected = reference.ttest_rel(treated, control)
    interval = expected.confidence_interval()
    assert found.p == pytest.approx(expected.pvalue, rel=1e-5, abs=1e-12)
    assert [found.low, found.high] == pytest.approx([interval.low, interval.high])


def test_paired_difference_without_spread() -> None:
    assert 0 < (stats.paired_difference([2.0, 3.0], [1.0, 2.0]).p or 0) < 1e-300
    assert stats.paired_difference([2.0, 3.0], [2.0, 3.0]).p == 1.0
    assert stats.paired_difference([2.0], [1.0]).p is None


def test_holm_by_hand() -> None:
    """Smallest times 4, next times 3, and so on, never falling: the textbook rule."""
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.5, 0.6]) == pytest.approx([1.0, 1.0])
    assert stats.holm([]) == []


def test_holm_counts_the_test_that_could_not_be_made() -> None:
    assert stats.holm([None, 0.01]) == [None, pytest.approx(0.02)]


def test_holm_keeps_the_family_wise_error() -> None:
    rng = np.random.default_rng(3)
    false_finds = sum(
        min(p for p in stats.holm(rng.uniform(size=6).tolist()) if p is not None) < 0.05
        for _ in range(4000)
    )
    assert 0.04 < false_finds / 4000 < 0.06


@pytest.mark.parametrize(("effect", "n"), [(0.0, 4), (0.5, 3), (1.0, 5), (2.0, 3), (3.0, 12)])
def test_power_is_the_share_of_experiments_that_find_the_effect(effect: float, n: int) -> None:
    draws = np.random.default_rng(11).normal(effect, 1.0, size=(20_000, n))
    found = (reference.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05).mean()
    assert stats.paired_power(effect, 1.0, n) == pytest.approx(found, abs=0.012)


def test_pairs_needed_is_the_first_count_with_enough_power() -> None:
    needed = stats.pairs_needed(0.8, 1.0)
    assert needed == 15  # the textbook's answer for d = 0.8, alpha 0.05, power 0.8
    assert stats.paired_power(0.8, 1.0, 14) < 0.8 <= stats.paired_power(0.8, 1.0, 15)


def test_pairs_needed_far_out() -> None:
    """Large n tends to the normal formula (z_a + z_b)^2 / d^2, and past reason there is none."""
    z = reference.norm.isf(0.025) + reference.norm.isf(0.2)
    assert stats.pairs_needed(0.01, 1.0) == pytest.approx((z / 0.01) ** 2, rel=0.001)
    assert stats.pairs_needed(1e-6, 1.0) is None
    assert stats.pairs_needed(0.0, 1.0) is None
    assert stats.pairs_needed(0.1, 0.0) == 2


def test_more_pairs_counts_from_those_at_hand() -> None:
    gaps = [0.9, -0.2, 1.7]
    needed = stats.pairs_needed(fmean(gaps), stats.std(gaps) or math.nan)
    assert needed is not None
    assert stats.more_pairs(gaps) == needed - 3
    assert stats.more_pairs([1.0, 1.001, 0.999]) == 0
    assert stats.more_pairs([1.0]) is None
    stricter = stats.more_pairs(gaps, alpha=0.05 / 8)
    assert stricter is not None
    assert stricter > needed - 3


counts = st.lists(st.integers(0, 50), min_size=2, max_size=6)


@given(counts, st.integers(1, 10_000), st.sampled_from([0, 1, 7, 400]))
def test_no_figure_on_a_grid_has_a_p_of_0_or_an_interval_of_width_0(
    cells: list[int], size: int, width: int
) -> None:
    """Whatever the figures: all equal, all 0, of a huge or tiny grid, with or without its width."""
    values = [float(size * cell) for cell in cells]
    sample = stats.summarize(values, width)
    assert sample.low is not None
    assert sample.high is not None
    assert sample.low < sample.high
    for other in (values, [value + size for value in values], [size * 3.0] * len(values)):
        found = stats.paired_difference(values, other, width)
        assert found.p
        assert 0 < found.p <= 1
        assert found.low is not None
        assert found.high is not None
        assert found.low < found.mean < found.high
        for paired in (True, False):
            if any(other) and any(values):
                ratio = stats.ratio_of_means(values, other, paired=paired, widths=(width, width))
                assert (ratio.low is None) == (ratio.high is None)
                if ratio.low is not None and ratio.high is not None:
                    assert ratio.low < ratio.high
    assert (stats.equality(values, 0.01) or 0) > 0
    p = stats.below_target(len(values), fmean(values), stats.std(values), 1.0)[1]
    assert p is None or 0 < p <= 1


def test_the_width_of_a_cell_goes_into_the_interval() -> None:
    equal = stats.summarize([100.0] * 3, width=12.0)
    half = reference.norm.ppf(0.975) * 12 / math.sqrt(12)
    assert [equal.low, equal.high] == pytest.approx([100 - half, 100 + half])
    spread = stats.summarize([90.0, 100.0, 110.0], width=1e-3)
    plain = stats.summarize([90.0, 100.0, 110.0])
    assert [spread.low, spread.high] == pytest.approx([plain.low, plain.high])


@pytest.mark.parametrize("noise", [0.0, 1.0, 4.0, 20.0])
def test_intervals_cover_figures_that_are_known_to_a_cell_alone(noise: float) -> None:
    """Each experiment reads its figures off the upper ends of cells that it shares."""
    draws = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        true, width = draws.uniform(50, 60), 10.0
        offset = draws.uniform(0, width)  # where the grid lies
        seeds = true + noise * draws.standard_normal(4)
        ends = np.ceil((seeds - offset) / width) * width + offset
        found = stats.summarize((ends - width / 2).tolist(), width)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= true <= found.high
    assert covered / 2000 > 0.94


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("noise", [1.0, 2.0])
def test_a_cell_keeps_its_promise_with_few_seeds(n: int, noise: float) -> None:
    """Misses of the interval, and false alarms of paired differences, with cells that runs share.

    Degrees of freedom taken from the ratio of the two variances would miss 12% with two seeds.
    """
    draws = np.random.default_rng(3)
    missed = alarms = 0
    for _ in range(1500):
        shift = draws.uniform(-0.5, 0.5, size=2)  # of each recipe's figures, the same for all seeds
        first, second = (noise * draws.standard_normal((2, n)) + shift[:, None]).tolist()
        found = stats.summarize(first, 1.0)
        assert found.low is not None
        assert found.high is not None
        missed += not found.low <= 0 <= found.high
        alarms += (stats.paired_difference(first, second, math.sqrt(2)).p or 1) < 0.05
    assert missed / 1500 < 0.055
    assert alarms / 1500 < 0.055


@given(counts, st.integers(1, 100), st.integers(1, 100))
def test_a_wider_cell_never_narrows_an_interval(values: list[int], width: int, more: int) -> None:
    sample = [value / 7 for value in values]
    narrow, wide = (stats.summarize(sample, w / 10) for w in (width, width + more))
    assert narrow.low is not None
    assert wide.low is not None
    assert wide.low <= narrow.low
    other = [0.0] * len(sample)
    p = [stats.paired_difference(sample, other, w / 10).p or 0 for w in (width, width + more)]
    assert p[0] <= p[1] * (1 + 1e-9)


def test_p_is_the_level_whose_interval_ends_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    treated, control = [10.0, 11.0, 12.0], [9.0, 9.5, 9.0]
    found = stats.paired_difference(treated, control, 1.0)
    assert found.p is not None
    monkeypatch.setattr(stats, "CONFIDENCE", 1 - found.p)
    assert stats.paired_difference(treated, control, 1.0).low == pytest.approx(0.0, abs=1e-9)


def test_equality_is_two_one_sided_tests() -> None:
    gaps = [0.002, -0.001, 0.003, 0.0]
    for margin in (0.001, 0.01):
        low = reference.ttest_1samp(gaps, -margin, alternative="greater").pvalue
        high = reference.ttest_1samp(gaps, margin, alternative="less").pvalue
        assert stats.equality(gaps, margin) == pytest.approx(max(low, high), rel=1e-4)
    assert stats.equality([0.0], 0.01) is None
