"""The rule of the optimizer track, on losses that are made up."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from speedrun.science.compare import Entry
from speedrun.science.rule import ENOUGH, Sigma, least, next_place, pairs, passes, pooled
from speedrun.science.stats import all_differences, paired_difference

KNOWN = Sigma(0.01, ENOUGH)


def test_sigma_is_pooled_around_the_mean_of_each_cell() -> None:
    rng = np.random.default_rng(0)
    cells = [rng.normal(mean, 0.3, size=n).tolist() for mean, n in ((3, 5), (9, 4), (4, 2), (1, 1))]
    squares = sum(np.var(cell, ddof=1) * (len(cell) - 1) for cell in cells if len(cell) > 1)
    found = pooled([*cells, [None, 2.0], []])
    assert found is not None
    assert found.df == 4 + 3 + 1
    assert found.value == pytest.approx(math.sqrt(squares / 8))
    assert pooled([[1.0], [None, None]]) is None


def test_a_known_sigma_asks_for_the_public_rule_and_an_uncertain_one_for_more() -> None:
    assert KNOWN.factor == 3.09
    assert pytest.approx(scipy_stats.norm.isf(0.001), abs=0.001) == 3.09
    assert Sigma(0.01, 4).factor == pytest.approx(scipy_stats.t.isf(0.001, 4))
    margin = 3.09 * 0.01 / math.sqrt(4)
    assert passes([3.0 - margin - 1e-9] * 4, 3.0, KNOWN)
    assert not passes([3.0 - margin + 1e-9] * 4, 3.0, KNOWN)
    assert not passes([3.0 - margin + 1e-9] * 4, 3.0, Sigma(0.01, 12))
    assert not passes([1.0, None], 3.0, KNOWN), "a run that diverged reached nothing"
    assert not passes([1.0, 1.0], 3.0, None)


def test_the_result_is_the_shortest_length_that_passes_beside_one_that_does_not() -> None:
    good, bad = [2.9, 2.9], [3.0, 3.0]
    assert least({3: bad, 4: good, 5: good}, 3.0, KNOWN) == 4
    assert least({4: good, 5: good}, 3.0, KNOWN) is None, "a shorter one might pass"
    assert least({2: bad, 4: good}, 3.0, KNOWN) is None, "the neighbour is not known"
    assert least({2: bad, 3: good, 4: bad, 5: good}, 3.0, KNOWN) == 3


@pytest.mark.parametrize("start", [-9, -1, 0, 1, 12])
def test_the_walk_finds_it_from_anywhere(start: int) -> None:
    """At place p all seeds end 0.01 p below 3: with a margin of 0.02185 place 3 is the first."""
    cells: dict[int, list[float | None]] = {}
    while (place := next_place(cells, 3.0, KNOWN, start)) is not None:
        assert place not in cells
        cells[place] = [3.0 - 0.01 * place] * 2
        assert len(cells) < 20
    assert least(cells, 3.0, KNOWN) == 3


def test_differences_of_two_are_those_of_a_paired_test() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(0, 1, (2, 6)).tolist()
    [found] = all_differences({"a": a, "b": b}, {"a": 0.0, "b": 0.0}).values()
    by_hand = paired_difference(a, b)
    for key in ("mean", "std", "low", "high", "p"):
        assert getattr(found, key) == pytest.approx(getattr(by_hand, key), rel=1e-5)


def test_several_share_their_spread_and_seeds_fall_out() -> None:
    rng = np.random.default_rng(2)
    table = rng.normal(0, 0.1, (4, 5)) + np.array([[0], [0.5], [1], [1.5]])
    shifted = table + rng.normal(0, 9, 5)  # what is the same for all entries of a seed
    wide = dict.fromkeys("abcd", 0.0)
    found, again = (
        all_differences(dict(zip("abcd", rows.tolist(), strict=True)), wide)
        for rows in (table, shifted)
    )
    rest = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    error = math.sqrt(2 * (rest**2).sum() / 12 / 5)
    for pair, one in found.items():
        assert one.p == pytest.approx(2 * scipy_stats.t.sf(abs(one.mean) / error, 12), rel=1e-4)
        assert again[pair].p == pytest.approx(one.p, rel=1e-3)
    cells = all_differences(
        dict(zip("abcd", table.tolist(), strict=True)), dict.fromkeys("abcd", 2.0)
    )
    assert all((cells[pair].p or 0) > (one.p or 0) for pair, one in found.items())


def entries(steps: list[float | None]) -> list[Entry]:
    return [Entry(recipe="", seed=seed, steps_to_target=one, cell_steps=12 if one else None)
            for seed, one in enumerate(steps)]  # fmt: skip


def test_pairs_are_decided_by_the_logarithm_of_steps_over_all_of_a_text() -> None:
    found = pairs(
        {
            "adamw": entries([400, 410, 405, 396]),
            "muon": entries([300, 309, 304, 297]),
            "lion": entries([302, 306, 307, 295]),
            "late": entries([500, None, 520, 510]),
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
