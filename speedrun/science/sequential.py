"""Decisions that may be looked at after every seed: pure functions on lists of floats.

A t-test is right 95 times in 100 if the number of seeds was fixed before. Who looks after every
seed and stops at the first p < 0.05 is wrong far more often. Here a bet takes the test's place. Its
stake begins at 1, grows when the differences speak against a mean, and on average grows not at all
where that mean is the true one. So it reaches 20 with a chance of at most 1 in 20, at whichever
look (Ville's inequality): 1 / (the largest stake so far) is a p-value at any time, for any reason
to stop.

The bets are on the signs of differences (`bets.py`), and switches may depend on each other, as they
do when all are compared with the same runs.

A figure may be known to a cell alone, as a crossing between two validations is. How far into their
cells the true figures lie is a share that seeds have in common, so every share has to be bet
against. The stake is nearly always smallest where all differences are at the lower or all at the
upper ends of their cells. Some shares between are watched too; the interval goes from end to end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np

from speedrun.science.bets import (
    LARGEST_LOG,
    Floats,
    checked,
    fewest_pairs,
    log_equal,
    log_stakes,
    not_excluded,
)
from speedrun.science.stats import holm

SHARES = np.linspace(-1.0, 1.0, 17)  # of half a cell
CONTRADICTION = "earlier and later seeds contradict each other: no mean fits both"
COARSE = "the figures are known less well than the margin asks, with any number of seeds"

Verdict = Literal["helps", "hurts", "equal", "undecided"]
P = float | None  # None: could not be asked


@dataclass(frozen=True)
class Interval:
    """Means that no look has excluded; an end is None while the data cannot bound it."""

    low: float | None
    high: float | None
    empty: bool = False  # the looks exclude every mean; the ends are those of the last look alone


@dataclass(frozen=True)
class Look:
    """What the first n differences show. The p-values are the smallest of all looks so far."""

    n: int
    mean: float
    interval: Interval
    p: float  # of "no effect"
    above: bool  # the side of 0 that the strongest look was on
    p_equal: P  # of "at least a margin from 0"; None without a margin


@dataclass(frozen=True)
class Decision:
    """One switch: differences are (switched off - recipe), so above 0 the technique helped.

    `low` and `high` hold the mean at every look with a chance of 1 - alpha, for this switch alone.
    The adjusted ones, at alpha / m, do so for all m switches together. p-values are None where a
    note says why, or where there is no margin.
    """

    n: int
    mean: float | None
    low: float | None
    high: float | None
    low_adjusted: float | None
    high_adjusted: float | None
    p: P
    p_equal: P
    p_adjusted: P
    p_equal_adjusted: P
    within_margin: bool  # shown to be nearer to 0 than the margin; beside any verdict
    verdict: Verdict
    note: str = ""  # why no number of seeds would settle it


def _rows(differences: Sequence[float], cells: Sequence[float] | None) -> list[Floats]:
    """All differences at the lower ends of their cells first, and all at the upper ends last.

    `cells` are half as wide as what each difference is known to; None: they are exact, and there
    is one row.
    """
    exact = checked(differences)
    if cells is None:
        return [exact]
    return [exact + share * checked(cells) for share in SHARES]


def _narrowed(so_far: Interval, rows: Sequence[Floats], n: int, alpha: float) -> Interval:
    lower, upper = (not_excluded(tuple(row[:n].tolist()), alpha) for row in (rows[0], rows[-1]))
    if lower is None or upper is None:
        return so_far
    # Either end of the cells may be where the interval ends: the spread differs between them.
    low, high = min(lower[0], upper[0]), max(lower[1], upper[1])
    # Bets may exclude the mean of differences that lie to one side of it; it is shown inside.
    means = [float(row[:n].mean()) for row in (rows[0], rows[-1])]
    both_low = low if so_far.low is None else max(low, so_far.low)
    both_high = high if so_far.high is None else min(high, so_far.high)
    empty = so_far.empty or both_low > both_high
    if empty:
        both_low, both_high = low, high
    return Interval(min(both_low, *means), max(both_high, *means), empty)


def confidence_sequence(
    differences: Sequence[float], alpha: float = 0.05, cells: Sequence[float] | None = None
) -> Interval:
    """Means against which no look's stake has reached 1 / alpha: one interval for each look, cut.

    With a chance of 1 - alpha the true mean is inside at every look. So nothing in common between
    the looks is rare, or a sign that the differences are not what they are taken for (they drift,
    or have wild outliers). Then the last look's own interval is given and said to be `empty`: it
    describes the data, it promises nothing. Once empty stays empty.
    """
    rows, found = _rows(differences, cells), Interval(None, None)
    for n in range(1, len(differences) + 1):
        found = _narrowed(found, rows, n, alpha)
    return found


def watch(
    differences: Sequence[float],
    alpha: float = 0.05,
    margin: float | None = 0.01,
    cells: Sequence[float] | None = None,
    *,
    intervals: bool = True,
) -> list[Look]:
    """Every look at one switch, from the first difference to the last.

    Without `intervals` they are not asked for: they take most of the time.
    """
    rows = _rows(differences, cells)
    sides = [log_stakes(row) for row in rows]
    ups, downs = (np.minimum.reduce(side) for side in zip(*sides, strict=True))
    stakes = np.minimum(np.maximum(ups, downs) - math.log(2), LARGEST_LOG)
    equals = np.zeros_like(stakes)
    if margin is not None:
        equals = np.minimum.reduce([log_equal(row, margin) for row in rows])
        equals[: fewest_pairs(alpha, 1) - 1] = 0.0  # before there is an interval
    counts = np.arange(1, len(differences) + 1)
    means = np.array([np.cumsum(row) / counts for row in rows])
    found: list[Look] = []
    interval, effect, above, equal = Interval(None, None), 0.0, True, 0.0
    for n in counts.tolist():
        here, up = means[:, n - 1], bool(ups[n - 1] > downs[n - 1])
        if intervals:
            interval = _narrowed(interval, rows, n, alpha)
        if (here.min() > 0 if up else here.max() < 0) and stakes[n - 1] > effect:
            effect, above = float(stakes[n - 1]), up
        equal = max(equal, float(equals[n - 1]))
        p_equal = None if margin is None else math.exp(-equal)
        found.append(Look(n, float(here.mean()), interval, math.exp(-effect), above, p_equal))
    return found


def adjust(p_effect: Sequence[P], p_equal: Sequence[P] | None) -> tuple[list[P], list[P]]:
    """Both p-values of every switch, corrected for the family by Holm's rule.

    A switch has two nulls: "no effect" (mean 0) and "not equal" (a margin or more from 0). At most
    one of them is true, whatever the mean, so of 2 m nulls at most m are true and both are tested
    at alpha / m at first. Holm's rule then raises the level as fewer nulls can still be true. But
    where one null of a switch is rejected the other may be true, and is or was at risk: the switch
    goes on counting. It leaves the count when both are rejected (Shaffer 1986: Holm's rule for
    nulls that exclude each other). So each null is corrected by Holm in a list where every other
    switch stands with the larger of its two p-values.

    To take the smaller one instead, so that a switch leaves when it has a verdict, would be wrong:
    m switches without effect, found equal one after another, were each at risk of a false effect
    before, at alpha / m, alpha / (m - 1) and so on up to alpha: in all 2.7 alpha for m = 8.

    Without `p_equal` (None) there is one null a switch, and this is Holm's rule as it is known.
    """
    if p_equal is None:
        return holm(p_effect), [None] * len(p_effect)
    larger = [
        None if p is None or q is None else max(p, q)
        for p, q in zip(p_effect, p_equal, strict=True)
    ]

    def corrected(own: Sequence[P]) -> list[P]:
        return [holm([*larger[:i], p, *larger[i + 1 :]])[i] for i, p in enumerate(own)]

    return corrected(p_effect), corrected(p_equal)


def judge(looks: Sequence[Look | None], alpha: float) -> list[tuple[P, P, Verdict]]:
    """Both adjusted p-values and the verdict of every switch, from the latest look at each.

    None, and a look that contradicts those before, count in the family and decide nothing. An
    effect that is shown to be there is named, though it may be shown to be negligible too, and only
    while the mean of all differences is on the side of the look that showed it.
    """
    asked = [None if look is None or look.interval.empty else look for look in looks]
    equal = [None if look is None else look.p_equal for look in asked]
    without_margin = all(look is None or look.p_equal is None for look in asked)
    effects, equals = adjust(
        [None if look is None else look.p for look in asked], None if without_margin else equal
    )
    found: list[tuple[P, P, Verdict]] = []
    for look, p, p_equal in zip(asked, effects, equals, strict=True):
        verdict: Verdict = "undecided"
        if look is not None and p is not None and p <= alpha:
            if look.above == (look.mean > 0):
                verdict = "helps" if look.above else "hurts"
        elif p_equal is not None and p_equal <= alpha:
            verdict = "equal"
        found.append((p, p_equal, verdict))
    return found


def decide(
    family: Mapping[str, Sequence[float]],
    alpha: float = 0.05,
    margin: float | None = 0.01,
    cells: Mapping[str, Sequence[float]] | None = None,
    figure: str = "a loss",
) -> dict[str, Decision]:
    """A verdict on every switch, to be asked for after every seed; see `adjust` for the family.

    With a chance of 1 - alpha no look at any switch ever calls a mean of 0 an effect or a mean
    beyond the margin equal. Switches may have different numbers of differences. More of them
    never take a verdict back, but for the cases of a note and for a mean that changes its side.
    `cells` has half the width of what each difference is known to, `figure` the word for a note.

    A diverged run has no loss, so its difference is no number. It is not left out: the rest would
    speak of the seeds that went well. It is not taken for a large one either, for it may be the
    recipe that diverged. The switch is undecided with a note, and so is one whose looks contradict
    each other, or whose cells are wider than the margin and leave the side open. All count in the
    family.

    The sign is that of the bet that won, and a look counts only if its mean is on that side too.
    Half the stake is on each side, so the promise includes the sign at alpha / m; at Holm's larger
    levels, which need other switches to be settled in full, it is not part of the proof.
    """
    if margin is not None and not 0 < margin < math.inf:
        raise ValueError(f"a margin of {margin} cannot be used: equal is within some distance of 0")
    latest: list[Look | None] = []
    notes: list[str] = []
    fewest = fewest_pairs(alpha, len(family))
    halves: Mapping[str, Sequence[float] | None] = cells or dict.fromkeys(family)
    for name, differences in family.items():
        lost = sum(not math.isfinite(difference) for difference in differences)
        looks = [] if lost else watch(differences, alpha, margin, halves[name])
        latest.append(looks[-1] if looks else None)
        if lost:
            notes.append(f"{lost} of {len(differences)} pairs have a run without {figure}")
        elif looks and looks[-1].interval.empty:
            notes.append(CONTRADICTION)
        elif len(looks) >= fewest and _too_coarse(looks[-1], halves[name], margin):
            notes.append(COARSE)
        else:
            notes.append("")

    decisions = {}
    for (name, differences), look, told, (p, p_equal, verdict) in zip(
        family.items(), latest, notes, judge(latest, alpha), strict=True
    ):
        note = "" if told == COARSE and verdict != "undecided" else told
        alone = together = Interval(None, None)
        if look is not None:
            alone = look.interval
            together = confidence_sequence(differences, alpha / len(family), halves[name])
        decisions[name] = Decision(
            n=len(differences),
            mean=None if look is None else look.mean,
            low=alone.low,
            high=alone.high,
            low_adjusted=together.low,
            high_adjusted=together.high,
            p=None if look is None or note else look.p,
            p_equal=None if look is None or note else look.p_equal,
            p_adjusted=p,
            p_equal_adjusted=p_equal,
            within_margin=p_equal is not None and p_equal <= alpha,
            verdict=verdict,
            note=note,
        )
    return decisions


def _too_coarse(look: Look, cells: Sequence[float] | None, margin: float | None) -> bool:
    """Cells too wide to call it equal that reach across 0: seeds do not make them narrower."""
    half = fmean(cells) if cells else 0.0
    return margin is not None and half >= margin and abs(look.mean) <= half


def needs_more(decisions: Mapping[str, Decision]) -> list[str]:
    """The switches that another seed could settle: undecided, and without a note."""
    return [
        name for name, found in decisions.items() if found.verdict == "undecided" and not found.note
    ]
