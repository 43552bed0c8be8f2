"""Decisions that may be looked at after every seed: pure functions on lists of floats.

A t-test is right 95 times in 100 if the number of seeds was fixed before. Who looks after every
seed and stops at the first p < 0.05 is wrong far more often. Here a bet takes the test's place. Its
stake begins at 1, grows when the differences speak against a mean, and on average grows not at all
where that mean is the true one. So it reaches 20 with a chance of at most 1 in 20, at whichever
look (Ville's inequality): 1 / (the largest stake so far) is a p-value at any time, for any reason
to stop.

The stake is a Bayes factor of the t statistic with a normal prior of variance g on the effect in
standard deviations (Gonen et al. 2005; as a bet Lindon et al., arXiv 2210.08589). It holds for
normal differences of whatever spread, and switches may depend on each other, as they do when all
are compared with the same runs. Few values that happen to be alike have a small spread, whatever
they were drawn from, so no look counts before `fewest_pairs`.

A figure may be known to a cell alone, as a crossing between two validations is. How far into their
cells the true figures lie is a share that seeds have in common, so every share has to be bet
against. The stake is smallest, and the interval ends, where all differences are at the lower or all
at the upper ends of their cells: those two rows of numbers are watched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Literal

from speedrun.science.stats import holm

PRIOR = 5.0  # g: the larger, the fewer pairs settle a large effect, and the more a small one takes
LARGEST_LOG = 700.0  # e^700 and e^-700 are floats, so no p-value is 0 and no factor infinite
CONTRADICTION = "earlier and later seeds contradict each other: no mean fits both"
COARSE = "the figures are known less well than the margin asks, with any number of seeds"

Verdict = Literal["helps", "hurts", "equal", "undecided"]
P = float | None  # None: could not be asked


def fewest_pairs(alpha: float, switches: int) -> int:
    """As many as a sign test wants, all of them on one side, in a family of so many switches.

    Differences of two runs that differ in nothing but luck are as often above 0 as below, whatever
    their distribution, so that n of them lie on one side with a chance of 2^(1 - n).
    """
    return 1 + math.ceil(math.log2(max(1, switches) / alpha))


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


def log_bayes_factor(n: int, mean: float, spread: float, g: float = PRIOR) -> float:
    """Log of the stake against a true mean of 0, from n, mean and sample standard deviation.

    Written with n mean^2 and (n - 1) spread^2 in place of their ratio t^2 / (n - 1): so no spread
    at all needs no case of its own, it is the limit of a small one.
    """
    if n < 2:
        return 0.0
    grown = 1.0 + n * g
    signal, noise = abs(mean) * math.sqrt(n), spread * math.sqrt(n - 1)
    scale = max(signal, noise)
    if scale == 0.0:
        return -0.5 * math.log(grown)
    signal, noise = (signal / scale) ** 2, (noise / scale) ** 2
    gain = math.log((signal + noise) / (signal / grown + noise))
    return min(LARGEST_LOG, 0.5 * (n * gain - math.log(grown)))


def _prefixes(differences: Sequence[float]) -> Iterator[tuple[int, float, float]]:
    """n, mean and sample deviation of the first n, for every n.

    Welford's update: squares of deviations only grow, and equal values have a spread of exactly 0.
    """
    mean = squares = 0.0
    for n, value in enumerate(differences, start=1):
        if not math.isfinite(value):
            raise ValueError(f"difference {n} is {value}: a mean of it says nothing")
        step = value - mean
        mean += step / n
        squares += step * (value - mean)
        yield n, mean, math.sqrt(squares / (n - 1)) if n > 1 else 0.0


def bayes_factor(differences: Sequence[float], mean: float = 0.0, g: float = PRIOR) -> float:
    """The stake against a true mean of `mean` after all differences; 1 before the second."""
    log = 0.0
    for n, centre, spread in _prefixes(differences):
        log = log_bayes_factor(n, centre - mean, spread, g)
    return math.exp(log)


def evidence(differences: Sequence[float], mean: float = 0.0, g: float = PRIOR) -> float:
    """The largest stake against `mean` at any look, the first one of 1 included.

    1 / evidence is a p-value however often and for whatever reason one looked.
    """
    looks = _prefixes(differences)
    return math.exp(max((log_bayes_factor(n, m - mean, s, g) for n, m, s in looks), default=0.0))


def equality_evidence(differences: Sequence[float], margin: float, g: float = PRIOR) -> float:
    """The largest stake at any look against a true mean of `margin` or more from 0.

    A look counts if its mean is within the margin, with the smaller of its stakes against both
    ends. A true mean beyond an end makes such a look rarer than one on it: shift the data over.
    """
    looks = _prefixes(differences)
    return math.exp(max((_log_equal(n, m, s, margin, g) for n, m, s in looks), default=0.0))


def _log_equal(n: int, mean: float, spread: float, margin: float, g: float) -> float:
    """Of one look, and 0, the stake's beginning, for a look that does not count."""
    if abs(mean) >= margin:
        return 0.0
    # The stake grows with the distance, so the smaller one is that against the nearer end.
    return log_bayes_factor(n, margin - abs(mean), spread, g)


@lru_cache(maxsize=4096)
def critical_t(n: int, alpha: float = 0.05, g: float = PRIOR) -> float | None:
    """The |t| at which n differences bring the stake to 1 / alpha; None: none is large enough."""
    if n < 2:
        return None
    grown = 1.0 + n * g
    # B = 1 / alpha is (1 + x) / (1 + x / grown) = wanted, where x = t^2 / (n - 1).
    wanted = math.exp((0.5 * math.log(grown) - math.log(alpha)) * 2.0 / n)
    if wanted >= grown:
        return None
    return math.sqrt((n - 1) * (wanted - 1.0) / (1.0 - wanted / grown))


Ends = tuple[tuple[float, float], ...]  # mean and deviation at each end of the cells


def _ends(
    differences: Sequence[float], cells: Sequence[float] | None
) -> Iterator[tuple[int, Ends]]:
    """n, and mean and deviation of the first n, with all at the lower and all at the upper ends.

    `cells` are half as wide as what each difference is known to; None: they are exact, and there
    is one end.
    """
    if cells is None:
        for n, mean, spread in _prefixes(differences):
            yield n, ((mean, spread),)
        return
    lower = _prefixes([d - half for d, half in zip(differences, cells, strict=True)])
    upper = _prefixes([d + half for d, half in zip(differences, cells, strict=True)])
    for (n, *low), (_, *high) in zip(lower, upper, strict=True):
        yield n, ((low[0], low[1]), (high[0], high[1]))


def _narrowed(so_far: Interval, n: int, ends: Ends, alpha: float, g: float) -> Interval:
    t = critical_t(n, alpha, g)
    if t is None:
        return so_far
    # Either end of the cells may be where the interval ends: the spread differs between them.
    low = min(mean - t * spread / math.sqrt(n) for mean, spread in ends)
    high = max(mean + t * spread / math.sqrt(n) for mean, spread in ends)
    if so_far.empty:
        return Interval(low, high, empty=True)
    both_low = low if so_far.low is None else max(low, so_far.low)
    both_high = high if so_far.high is None else min(high, so_far.high)
    if both_low > both_high:
        return Interval(low, high, empty=True)
    return Interval(both_low, both_high)


def confidence_sequence(
    differences: Sequence[float],
    alpha: float = 0.05,
    g: float = PRIOR,
    cells: Sequence[float] | None = None,
) -> Interval:
    """Means against which no look's stake has reached 1 / alpha: one interval for each look, cut.

    With a chance of 1 - alpha the true mean is inside at every look. So nothing in common between
    the looks is rare, or a sign that the differences are not what they are taken for (they drift,
    or have wild outliers). Then the last look's own interval is given and said to be `empty`: it
    describes the data, it promises nothing. Once empty stays empty.
    """
    found = Interval(None, None)
    for n, ends in _ends(differences, cells):
        found = _narrowed(found, n, ends, alpha, g)
    return found


def watch(
    differences: Sequence[float],
    alpha: float = 0.05,
    margin: float | None = 0.01,
    g: float = PRIOR,
    cells: Sequence[float] | None = None,
    fewest: int = 2,
) -> list[Look]:
    """Every look at one switch, from the first difference to the last, in one pass.

    p-values stay 1 before the `fewest`-th, the interval is told from the start.
    """
    found: list[Look] = []
    interval, effect, equal, above = Interval(None, None), 0.0, 0.0, False
    for n, ends in _ends(differences, cells):
        interval = _narrowed(interval, n, ends, alpha, g)
        means = [mean for mean, _ in ends]
        if n >= fewest:
            if min(means) > 0 or max(means) < 0:
                against = min(log_bayes_factor(n, *end, g) for end in ends)
                if against > effect:
                    effect, above = against, means[0] > 0
            if margin is not None:
                equal = max(equal, min(_log_equal(n, *end, margin, g) for end in ends))
        p_equal = None if margin is None else math.exp(-equal)
        found.append(Look(n, sum(means) / len(means), interval, math.exp(-effect), above, p_equal))
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
    g: float = PRIOR,
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
    family. Fewer than `fewest_pairs` differences say nothing, and count too.

    The sign is that of the strongest look. A wrong one needs a true mean outside the interval of
    that level. At alpha / m the promise above includes it; at Holm's larger levels, which need
    other switches to be settled in full, a wrong sign is as rare but not part of the proof.
    """
    if margin is not None and not 0 < margin < math.inf:
        raise ValueError(f"a margin of {margin} cannot be used: equal is within some distance of 0")
    latest: list[Look | None] = []
    notes: list[str] = []
    fewest = fewest_pairs(alpha, len(family))
    halves: Mapping[str, Sequence[float] | None] = cells or dict.fromkeys(family)
    for name, differences in family.items():
        lost = sum(not math.isfinite(difference) for difference in differences)
        looks = [] if lost else watch(differences, alpha, margin, g, halves[name], fewest)
        latest.append(looks[-1] if looks else None)
        if lost:
            notes.append(f"{lost} of {len(differences)} pairs have a run without {figure}")
        elif looks and looks[-1].interval.empty:
            notes.append(CONTRADICTION)
        elif looks and looks[-1].n >= fewest and _too_coarse(looks[-1], halves[name], margin):
            notes.append(COARSE)
        else:
            notes.append("")

    decisions = {}
    for (name, differences), look, note, (p, p_equal, verdict) in zip(
        family.items(), latest, notes, judge(latest, alpha), strict=True
    ):
        alone = together = Interval(None, None)
        if look is not None:
            alone = look.interval
            together = confidence_sequence(differences, alpha / len(family), g, halves[name])
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
