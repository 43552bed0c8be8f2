"""The rule of the optimizer track, on losses that are made up."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats

from speedrun.science.rule import (
    AROUND,
    Line,
    Z,
    around,
    least,
    line_of,
    margin,
    next_place,
    pairs,
    passes,
)
from speedrun.science.stats import (
    PairedDifference,
    blocks,
    difference_in_blocks,
    paired_difference,
)

SIGMA = 0.01


def test_the_rule_is_the_public_one() -> None:
    assert pytest.approx(scipy_stats.norm.isf(0.001), abs=0.001) == Z
    below = Z * SIGMA / math.sqrt(4)
    assert margin(SIGMA, 4) == pytest.approx(below)
    assert passes([3.0 - below - 1e-9] * 4, 3.0, SIGMA)
    assert not passes([3.0 - below + 1e-9] * 4, 3.0, SIGMA)
    assert not passes([3.0 - below - 1e-9] * 3, 3.0, SIGMA), "fewer seeds prove less"
    assert not passes([1.0, None], 3.0, SIGMA), "a run that diverged reached nothing"
    assert not passes([], 3.0, SIGMA)


def test_the_result_is_the_shortest_length_that_passes_beside_one_that_does_not() -> None:
    good, bad = [2.9, 2.9], [3.0, 3.0]
    assert least({3: bad, 4: good, 5: good}, 3.0, SIGMA) == 4
    assert least({4: good, 5: good}, 3.0, SIGMA) is None, "a shorter one might pass"
    assert least({2: bad, 4: good}, 3.0, SIGMA) is None, "the neighbour is not known"
    assert least({2: bad, 3: good, 4: bad, 5: good}, 3.0, SIGMA) == 3


@pytest.mark.parametrize("start", [-9, -1, 0, 1, 12])
def test_the_walk_finds_it_from_anywhere(start: int) -> None:
    """At place p all seeds end 0.01 p below 3: with a margin of 0.02185 place 3 is the first."""
    cells: dict[int, list[float | None]] = {}
    while (place := next_place(cells, 3.0, SIGMA, start)) is not None:
        assert place not in cells
        cells[place] = [3.0 - 0.01 * place] * 2
        assert len(cells) < 20
    assert least(cells, 3.0, SIGMA) == 3


def differences(table: Any) -> dict[tuple[int, int], PairedDifference]:
    found = blocks(table.tolist())
    assert found is not None
    return {
        (i, j): difference_in_blocks(found, (table[i] - table[j]).tolist(), (1.0, 1.0))
        for i in range(len(table)) for j in range(i + 1, len(table))
    }  # fmt: skip


def test_differences_of_two_are_those_of_a_paired_test() -> None:
    table = np.random.default_rng(1).normal(0, 1, (2, 6))
    [found] = differences(table).values()
    by_hand = paired_difference(*table.tolist())
    for key in ("mean", "std", "low", "high", "p"):
        assert getattr(found, key) == pytest.approx(getattr(by_hand, key), rel=1e-5)


def test_several_share_their_spread_and_seeds_fall_out() -> None:
    rng = np.random.default_rng(2)
    table = rng.normal(0, 0.1, (4, 5)) + np.array([[0], [0.5], [1], [1.5]])
    shifted = table + rng.normal(0, 9, 5)  # what is the same for all entries of a seed
    found, again = differences(table), differences(shifted)
    rest = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    pooled = 2 * (rest**2).sum() / 12
    for pair, one in found.items():
        own = (table[pair[0]] - table[pair[1]]).var(ddof=1)  # counts where it is the larger
        error = math.sqrt(max(pooled, own) / 5)
        assert one.p == pytest.approx(2 * scipy_stats.t.sf(abs(one.mean) / error, 12), rel=1e-4)
        assert again[pair].p == pytest.approx(one.p, rel=1e-3)
    assert blocks([[1.0, 2.0]]) is None
    assert blocks([]) is None


def test_where_units_differ_what_seeds_share_stays_in() -> None:
    """Levels in nats, seeds far apart: a crossing is a level over a slope, and slopes differ."""
    rng = np.random.default_rng(4)
    seeds, own = rng.normal(0, 1, 4000), rng.normal(0, 0.1, (2, 4000))
    table = own + seeds
    found = blocks(table.tolist())
    assert found is not None
    assert found.rest == pytest.approx(0.01, rel=0.1)
    assert found.between == pytest.approx(1.0, rel=0.1)
    factors = (2.5, 5.0)
    scaled = table * np.array(factors)[:, None]
    by_hand = np.std(scaled[0] - scaled[1], ddof=1)
    alike = difference_in_blocks(found, [0.0, 0.0], factors)
    assert alike.std == pytest.approx(by_hand, rel=0.05)


def test_a_noisy_entry_is_judged_by_its_own_spread() -> None:
    rng = np.random.default_rng(7)
    table = rng.normal(0, 0.01, (10, 5))
    table[0] *= 30
    found = differences(table)
    own = paired_difference(*table[:2].tolist())
    assert found[0, 1].std == pytest.approx(own.std, rel=1e-5)
    assert found[0, 1].std != pytest.approx(found[1, 2].std, rel=0.5)


def made(
    crossing: float, lengths: list[int], seeds: int, spread: float = 0.0
) -> dict[int, list[float | None]]:
    """Losses that fall by 0.4 for e times the steps and meet 3.5 at `crossing`; noise beside it."""
    rng = np.random.default_rng(3)
    own, noise = rng.normal(0, spread, seeds), rng.normal(0, spread, (len(lengths), seeds))
    return {
        steps: [
            float(3.5 - 0.4 * math.log(steps / crossing) + own[s] + noise[i][s])
            for s in range(seeds)
        ]
        for i, steps in enumerate(lengths)
    }


def test_crossings_lie_on_a_line_through_all_lengths() -> None:
    lengths = [round(400 * 1.03 ** (2 + offset)) for offset in AROUND]
    exact = line_of(made(410.0, lengths, 3), 3.5)
    assert exact is not None
    assert np.exp(exact.crossings) == pytest.approx([410.0] * 3)
    noisy = made(410.0, lengths, 40, 0.01)
    found = line_of(noisy, 3.5)
    assert found is not None
    logs = np.log(lengths)
    table = np.array([noisy[steps] for steps in lengths], dtype=float)
    slope = np.mean([np.polyfit(logs, table[:, seed], 1)[0] for seed in range(40)])
    assert found.slope == pytest.approx(slope)
    assert found.crossings == pytest.approx((logs.mean() + (3.5 - table.mean(0)) / slope).tolist())
    # A seed that ends 0.01 lower at every length crosses so much sooner.
    lower = {steps: [(losses[0] or 0) - 0.01, *losses[1:]] for steps, losses in noisy.items()}
    sooner = line_of(lower, 3.5)
    assert sooner is not None
    assert found.crossings[0] - sooner.crossings[0] == pytest.approx(0.01 / 0.4, rel=0.2)


def test_a_line_that_is_not_known_is_none() -> None:
    lengths = [380, 400, 420]
    good = made(400.0, lengths, 2)
    assert line_of(good, 3.5)
    assert line_of({400: good[400]}, 3.5) is None, "one length has no slope"
    assert line_of(good | {400: [3.5, None]}, 3.5) is None, "a run diverged"
    assert line_of(made(400.0, [410, 420, 430], 2), 3.5) is None, "it lies outside of the lengths"
    rising = {steps: [-(loss or 0) for loss in losses] for steps, losses in good.items()}
    assert line_of(rising, -3.5) is None
    assert line_of({}, 3.5) is None


def test_a_flat_line_is_followed_until_it_is_above_the_target() -> None:
    assert around(10, {}, 3.5) == [5, 7, 9, 10, 12]
    high: list[float | None] = [3.6, 3.6]
    low: list[float | None] = [3.4, 3.4]
    assert around(10, {5: high}, 3.5) == [5, 7, 9, 10, 12]
    assert around(10, {5: low}, 3.5) == [3, 5, 7, 9, 10, 12], "one more, to be run"
    assert around(10, {5: low, 3: [3.5, 3.6]}, 3.5) == [3, 5, 7, 9, 10, 12]
    assert around(10, {5: low, 3: [None, 3.4]}, 3.5) == [3, 5, 7, 9, 10, 12], "one diverged there"


def line(*steps: float, slope: float = -0.4) -> Line:
    """Of an entry whose seeds cross 3.5 at so many steps."""
    levels = tuple(3.5 - slope * (math.log(one) - 6.0) for one in steps)
    return Line(6.0, slope, levels, 3.5)


def test_pairs_are_decided_by_the_logarithm_of_steps_over_all_of_a_text() -> None:
    assert np.exp(line(400, 410).crossings) == pytest.approx([400, 410])
    found = pairs(
        {
            "adamw": line(400, 410, 405, 396),
            "muon": line(300, 309, 304, 297),
            "lion": line(302, 306, 307, 295),
            "late": None,
        }
    )
    decided = {(pair.first, pair.second): pair.fewer for pair in found}
    assert decided == {
        ("adamw", "muon"): "muon", ("adamw", "lion"): "lion", ("adamw", "late"): None,
        ("muon", "lion"): None, ("muon", "late"): None, ("lion", "late"): None,
    }  # fmt: skip
    muon = next(pair for pair in found if pair.second == "muon")
    assert muon.difference is not None
    assert math.exp(muon.difference.mean) == pytest.approx(400 / 300, rel=0.01)
    assert muon.p_holm is not None
    assert muon.p_holm == pytest.approx(6 * (muon.difference.p or 0), rel=1e-6)


def test_a_flat_entry_is_known_less_well_than_a_steep_one() -> None:
    """The same spread of losses is more steps where losses fall slowly."""
    noise = ((1.0, -1.0, 0.5, -0.5), (-0.5, 1.0, -1.0, 0.5), (0.5, 0.5, -0.5, -0.5))

    def entry(at: int, slope: float) -> Line:
        return Line(6.0, slope, tuple(3.5 + 0.01 * one for one in noise[at]), 3.5)

    steep = pairs({"a": entry(0, -0.4), "b": entry(1, -0.4), "c": entry(2, -0.4)})
    flat = pairs({"a": entry(0, -0.2), "b": entry(1, -0.2), "c": entry(2, -0.4)})
    assert steep[0].difference
    assert flat[0].difference
    assert flat[0].difference.std == pytest.approx(2 * (steep[0].difference.std or 0))


@pytest.mark.parametrize("slopes", [[0.4] * 10, [0.4] * 8 + [0.3] * 2, [0.38] * 8 + [0.19] * 2])
def test_of_tables_of_equal_entries_one_in_twenty_decides_a_pair(slopes: list[float]) -> None:
    """Entries that cross at the same length; losses have a part by seed and one of their own."""
    rng = np.random.default_rng(5)
    wrong, tables = 0, 400
    for _ in range(tables):
        seeds = rng.normal(0, 0.008, 5)
        lines = {}
        for number, slope in enumerate(slopes):
            margin = Z * 0.012 / math.sqrt(5) / slope / math.log(1.03)  # places after the crossing
            lengths = [round(400 * 1.03 ** (math.ceil(margin) + offset)) for offset in AROUND]
            own = rng.normal(0, 0.006, 5)
            losses = {
                steps: (3.5 - slope * math.log(steps / 400) + seeds + own
                        + rng.normal(0, 0.007, 5)).tolist()
                for steps in lengths
            }  # fmt: skip
            lines[str(number)] = line_of(losses, 3.5)
        wrong += any(pair.fewer for pair in pairs(lines))
    assert wrong / tables < 0.085  # 0.05 and more than three standard errors
