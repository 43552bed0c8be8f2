"""Watched decisions: the promised rates of error against thousands of simulated families.

The families go through `watch` and `judge`, of which `decide` is made, since `watch` gives all
looks at a switch in one pass; a part of them goes through `decide` itself, seed by seed.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import stdtr

from speedrun.science import sequential
from speedrun.science.sequential import Look
from speedrun.science.stats import holm
from tests.science import power_table

ROOT = Path(__file__).parents[2]
ALPHA = 0.05
SWITCHES = 8
SEEDS = 30
SPREAD = math.sqrt(2.0)  # of a difference: a run and its control, each with a deviation of 1

Floats = NDArray[np.float64]


def families(count: int, effects: Sequence[float], seed: int, seeds: int = SEEDS) -> Floats:
    """Differences by family, switch and seed; one control for all switches of a family."""
    rng = np.random.default_rng(seed)
    runs = rng.normal(size=(count, len(effects), seeds))
    control = rng.normal(size=(count, 1, seeds))
    return np.asarray(runs - control + np.array(effects)[:, None])


def followed(looks: Sequence[Sequence[Look]], alpha: float = ALPHA) -> list[str]:
    """Verdicts on a family looked at after every seed, where only the undecided get another."""
    have = [2] * len(looks)
    verdicts = ["undecided"] * len(looks)
    before: list[tuple[float, float, bool, bool]] = []
    for n in range(2, len(looks[0]) + 1):
        have = [n if v == "undecided" else k for k, v in zip(have, verdicts, strict=True)]
        latest = [all_looks[k - 1] for all_looks, k in zip(looks, have, strict=True)]
        shown = [
            (look.p, look.p_equal or 1.0, look.interval.empty, look.mean > 0) for look in latest
        ]
        if shown != before and min(min(one[:2]) for one in shown) <= alpha:  # else none changes
            verdicts = [verdict for _, _, verdict in sequential.judge(latest, alpha)]
        before = shown
    return verdicts


def watch(row: Sequence[float], margin: float | None) -> list[Look]:
    """Without intervals: they can only keep a verdict back, where looks contradict each other."""
    return sequential.watch(row, ALPHA, margin, intervals=False)


def watched(family: Floats, margin: float | None) -> list[str]:
    return followed([watch(row, margin) for row in family.tolist()])


def share_with(
    verdicts: Sequence[Sequence[str]], false: Sequence[str], among: Sequence[int] = range(SWITCHES)
) -> float:
    return sum(any(v[i] in false for i in among) for v in verdicts) / len(verdicts)


EFFECT = ("helps", "hurts")


def test_the_shortcut_of_the_simulations_is_decide_after_every_seed() -> None:
    effects = SPREAD * np.array([0, 0, 0, 0.5, 1, -1, 2, -4])
    for family in families(60, effects.tolist(), seed=11, seeds=14):
        rows = {str(i): row for i, row in enumerate(family.tolist())}
        have = dict.fromkeys(rows, 2)
        for _ in range(2, 15):
            seen = {name: row[: have[name]] for name, row in rows.items()}
            found = sequential.decide(seen, ALPHA, 1.5 * SPREAD)
            for name in sequential.needs_more(found):
                have[name] += 1
        assert [decision.verdict for decision in found.values()] == watched(family, 1.5 * SPREAD)


@pytest.mark.parametrize("margin", [None, 2 * SPREAD])
def test_families_without_an_effect(margin: float | None) -> None:
    found = [watched(family, margin) for family in families(2000, [0.0] * SWITCHES, seed=1)]
    assert 0.001 < share_with(found, EFFECT) <= ALPHA
    if margin is not None:
        assert share_with(found, ["equal"]) > 0.5  # so there was something to be wrong about


def test_families_on_the_edge_of_the_margin() -> None:
    """As the verdict "equal" of a family that stops, and as `within_margin` of one that does not.

    The second is the harder one: p-values are the smallest so far, so all 30 looks are in the last.
    """
    edge = [SPREAD, -SPREAD] * (SWITCHES // 2)
    verdicts, within = [], 0
    for family in families(2000, edge, seed=2).tolist():
        looks = [watch(row, SPREAD) for row in family]
        verdicts.append(followed(looks))
        last = sequential.judge([all_looks[-1] for all_looks in looks], ALPHA)
        within += any(p_equal is not None and p_equal <= ALPHA for _, p_equal, _ in last)
    assert 0.001 < share_with(verdicts, ["equal"]) <= ALPHA
    assert 0.002 < within / 2000 <= ALPHA


@pytest.mark.parametrize("margin", [None, SPREAD])
def test_families_in_which_some_have_an_effect(margin: float | None) -> None:
    effects = (SPREAD * np.array([0, 0, 0, 0, 1, 2, 4, -2])).tolist()
    found = [watched(family, margin) for family in families(1000, effects, seed=3)]
    assert 0.001 < share_with(found, EFFECT, range(4)) <= ALPHA
    assert share_with(found, ["hurts", "equal"], range(4, 7)) <= ALPHA
    assert share_with(found, ["helps"], [6]) > 0.99


def bimodal(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return np.asarray(rng.choice([-1.0, 1.0], size=shape) + 0.1 * rng.normal(size=shape))


def skewed(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Losses with a long tail upwards, of both runs of a pair."""
    return np.asarray(rng.lognormal(sigma=1.0, size=shape) - rng.lognormal(sigma=1.0, size=shape))


def rounded(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return np.asarray(np.round(rng.normal(size=shape)))


def heavy(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return np.asarray(rng.standard_t(3, size=shape))


@pytest.mark.parametrize("draw", [bimodal, skewed, rounded, heavy])
@pytest.mark.parametrize("switches", [1, 8])
def test_differences_that_are_not_normal(
    draw: Callable[[np.random.Generator, tuple[int, ...]], Floats], switches: int
) -> None:
    """Alike on both sides of 0, as the differences of two runs are that differ by luck alone."""
    count = 8000 // switches
    drawn = draw(np.random.default_rng(4), (count, switches, SEEDS))
    found = [watched(family, None) for family in drawn]
    assert share_with(found, EFFECT, range(switches)) <= ALPHA


def test_an_ordinary_t_test_watched_alike_is_wrong_far_more_often() -> None:
    """The same families, looks and rules with the p-values of t-tests, so the above can fail."""
    drawn = families(400, [0.0] * SWITCHES, seed=1)
    n = np.arange(2, SEEDS + 1)
    wrong = []
    for family in drawn:
        mean = np.cumsum(family, axis=1)[:, 1:] / n
        squares = np.cumsum(family**2, axis=1)[:, 1:] - n * mean**2
        t = mean / np.sqrt(squares / (n - 1) / n)
        p = np.minimum.accumulate(2 * stdtr(n - 1, -np.abs(t)), axis=1)
        looks = [
            [look if look.n < 2 else replace(look, p=float(row[look.n - 2]))
             for look in watch(differences, None)]
            for differences, row in zip(family.tolist(), p, strict=True)
        ]  # fmt: skip
        wrong.append([followed(looks), followed(looks[:1])])
    assert share_with([family for family, _ in wrong], EFFECT) > 4 * ALPHA
    assert share_with([alone for _, alone in wrong], EFFECT, [0]) > 4 * ALPHA


def test_false_alarms_are_not_rarer_than_they_need_be() -> None:
    """One switch watched to 30 pairs, with 5% allowed."""
    at = power_table.pairs_to_effect(0.0, 20_000, 30)
    assert 0.025 < np.isfinite(at).mean() < 0.04


def test_a_switch_that_left_with_its_verdict_would_break_the_promise() -> None:
    """The p-values that make the tempting rule wrong, and that ours has to stand.

    No switch has an effect, and all can be found equal: switch k just at the level Holm's rule
    gives to the k-th. A p-value of a false null may have any distribution, this one too.
    """

    def tempting(p_effect: list[float], p_equal: list[float]) -> bool:
        smaller = [min(pair) for pair in zip(p_effect, p_equal, strict=True)]
        return any(
            corrected is not None and corrected <= ALPHA and p < q
            for corrected, p, q in zip(holm(smaller), p_effect, p_equal, strict=True)
        )

    def ours(p_effect: list[float], p_equal: list[float]) -> bool:
        return any(p is not None and p <= ALPHA for p in sequential.adjust(p_effect, p_equal)[0])

    p_equal = [ALPHA / (SWITCHES - k) - 1e-9 for k in range(SWITCHES)]
    families = np.random.default_rng(5).uniform(size=(4000, SWITCHES)).tolist()

    def wrong(rule: Callable[[list[float], list[float]], bool]) -> float:
        return sum(rule(family, p_equal) for family in families) / len(families)

    assert wrong(tempting) > 2 * ALPHA
    assert 0.5 * ALPHA < wrong(ours) <= ALPHA + 0.007  # two standard errors of 4000 families


# The document


def test_the_table_of_the_document_is_what_its_command_prints() -> None:
    page = (ROOT / "docs" / "deciding.md").read_text()
    command = "python -m tests.science.power_table"
    assert f"`{command}`" in page
    done = subprocess.run(
        [sys.executable, *command.split()[1:]], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() in page
