"""The statistics behind every claim: pure functions on lists of floats.

A speedrun claim rests on a handful of seeds, so everything here is a small-sample method: Student's
t instead of the normal, Fieller's interval for a ratio of means, Holm for a family of tests, and
the noncentral t for the number of seeds a question still needs. Where a value cannot be known (the
spread of a single run, say) it is None, never NaN, and no function drops a value it was given.
scipy.special supplies the distribution functions; importing it takes a third of scipy.stats' time.

A figure that is only known to lie in a cell, as a crossing lies between two validations, is off by
a part of the cell's width that seeds share, so that more of them do not average it out. It counts
like an error spread evenly over the cell, of variance width^2 / 12. Half an interval is the root of
the sum of two squares: what the seeds' spread gives by Student's t, and what the cell gives by the
normal, since its width is known. (One t for both, with degrees of freedom from their ratio, would
be too narrow for two or three seeds: a wide cell would lower the t of the spread.) So equal figures
leave an interval as wide as their cells allow, no cell makes an interval narrower, and no p-value
is 0. Losses have a cell too, that of a 32-bit number.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from scipy.special import nctdtr, ndtri, stdtr, stdtrit

CONFIDENCE = 0.95
POWER = 0.8  # chance to find an effect, when seeds are counted for it
MOST_SEEDS = 524_288  # a question that needs more is given up
SMALLEST_P = 2.0**-1022  # the least that a float holds in full
EPSILON = 2.0**-23  # of 32-bit numbers, in which losses are computed


@dataclass(frozen=True)
class Sample:
    """Mean, sample standard deviation and t interval; the last three need two values."""

    n: int
    mean: float
    std: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Ratio:
    """A ratio of means; the ends are None where the data cannot bound it."""

    ratio: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class PairedDifference(Sample):
    """Paired differences, and a two-sided p-value that their mean is zero."""

    p: float | None


def std(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n - 1); exactly 0 for equal values, None for a single one."""
    if len(values) < 2:
        return None
    if min(values) == max(values):
        return 0.0  # their mean may be off by a rounding, and so would the deviations
    centre = fmean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def _cell_variance(width: float, *values: float) -> float:
    """Of figures known to within `width`, and never better than 32-bit numbers are."""
    resolution = EPSILON * max(1e-30, *map(abs, values))
    return max(width, resolution) ** 2 / 12


def _half(tail: float, df: float, sampled: float, known: float) -> float:
    """Half an interval with this chance beyond each end; variances of the mean, one estimated."""
    t = float(stdtrit(min(df, 1e12), tail)) if sampled else 0.0
    return math.hypot(t * math.sqrt(sampled), float(ndtri(tail)) * math.sqrt(known))


def _tail(distance: float, df: float, sampled: float, known: float) -> float:
    """The chance beyond a distance from the mean: `_half` turned round."""
    if distance < 0:
        return 1.0 - _tail(-distance, df, sampled, known)
    if known < 1e-12 * sampled:
        return max(float(stdtr(df, -distance / math.sqrt(sampled))), SMALLEST_P)
    low, high = math.log(SMALLEST_P), math.log(0.5)
    for _ in range(48):  # half an interval grows as the chance falls
        middle = (low + high) / 2
        if _half(math.exp(middle), df, sampled, known) > distance:
            low = middle
        else:
            high = middle
    return math.exp(high)


def summarize(values: Sequence[float], width: float = 0.0) -> Sample:
    """`width` is that of the cell each value is known to lie in."""
    n, centre, spread = len(values), fmean(values), std(values)
    if spread is None:
        return Sample(n, centre, None, None, None)
    sampled, known = spread**2 / n, _cell_variance(width, *values)
    half = _half((1 - CONFIDENCE) / 2, n - 1, sampled, known)
    return Sample(n, centre, spread, centre - half, centre + half)


def below_target(
    n: int, centre: float, spread: float | None, target: float
) -> tuple[float | None, float | None]:
    """One-sided one-sample t-test from its sufficient statistics; H0: the mean is at the target.

    Gives t and p = P(a mean this low, were the true one the target), the public rule's, without
    cells. One run has no spread, so no test; nor have equal values, which are copies or rounded
    too far to tell how runs differ.
    """
    if not spread:
        return None, None
    t = (centre - target) / (spread / math.sqrt(n))
    return t, max(float(stdtr(n - 1, t)), SMALLEST_P)


def below_target_known_sigma(
    n: int, centre: float, sigma: float, target: float
) -> tuple[float, float]:
    """The same question when the spread of one run is known: a z-test, good for a single run."""
    z = (centre - target) / (sigma / math.sqrt(n))
    return z, max(0.5 * math.erfc(-z / math.sqrt(2.0)), SMALLEST_P)


def ratio_of_means(
    numerator: Sequence[float],
    denominator: Sequence[float],
    *,
    paired: bool = False,
    widths: tuple[float, float] = (0.0, 0.0),
) -> Ratio:
    """mean(numerator) / mean(denominator) with Fieller's interval; `widths` are those of cells.

    The interval holds each r for which `numerator - r denominator` has a mean compatible with zero,
    so it is as sound as a t-test: exact for paired normal data at any n, with Welch's degrees of
    freedom when unpaired. It is unbounded, hence None, when the denominator's own interval reaches
    zero. `paired` needs lists in the same order of seeds; it gains when seeds move both alike.
    """
    top, bottom = fmean(numerator), fmean(denominator)
    ratio = top / bottom
    n, m = len(numerator), len(denominator)
    spread_top, spread_bottom = std(numerator), std(denominator)
    if spread_top is None or spread_bottom is None:
        return Ratio(ratio, None, None)
    var_top, var_bottom, shared = spread_top**2 / n, spread_bottom**2 / m, 0.0
    cell_top, cell_bottom = (
        _cell_variance(width, *values)
        for width, values in zip(widths, (numerator, denominator), strict=True)
    )
    if paired:
        products = ((a - top) * (b - bottom) for a, b in zip(numerator, denominator, strict=True))
        shared = math.fsum(products) / (n - 1) / n
        df = n - 1.0
    else:
        df = _welch_df(var_top, n, ratio**2 * var_bottom, m)
    tail = (1 - CONFIDENCE) / 2
    t2, z2 = float(stdtrit(df, tail)) ** 2, float(ndtri(tail)) ** 2
    # (top - r bottom)^2 <= t^2 Var(top - r bottom) + z^2 (cell_top + r^2 cell_bottom), a quadratic
    # in r: a r^2 - 2 b r + c <= 0
    a = bottom**2 - t2 * var_bottom - z2 * cell_bottom
    b = top * bottom - t2 * shared
    c = top**2 - t2 * var_top - z2 * cell_top
    if a <= 0:
        return Ratio(ratio, None, None)
    root = math.sqrt(max(0.0, b * b - a * c))
    return Ratio(ratio, (b - root) / a, (b + root) / a)


def _welch_df(var_a: float, n: int, var_b: float, m: int) -> float:
    """Welch and Satterthwaite's degrees of freedom of two squared standard errors."""
    estimated = var_a**2 / (n - 1) + var_b**2 / (m - 1)
    return (var_a + var_b) ** 2 / estimated if estimated else n + m - 2.0


def paired_difference(
    treated: Sequence[float], control: Sequence[float], width: float = 0.0
) -> PairedDifference:
    """treated - control, pair by pair: what differs between seeds falls out.

    `width` is that of the cell each difference is known to lie in.
    """
    width = max(width, EPSILON * max(map(abs, [*treated, *control])))
    found = summarize([a - b for a, b in zip(treated, control, strict=True)], width)
    if found.std is None:
        return PairedDifference(**vars(found), p=None)
    sampled, known = found.std**2 / found.n, _cell_variance(width, found.mean)
    p = 2 * _tail(abs(found.mean), found.n - 1, sampled, known)
    return PairedDifference(**vars(found), p=min(1.0, p))


@dataclass(frozen=True)
class Blocks:
    """Treatments, each tried on the same seeds: the usual analysis of blocks."""

    seeds: int
    rest: float  # variance of what is left when treatments and seeds are taken out
    between: float  # variance of what seeds have in common in all treatments
    df: int  # of the rest


def blocks(values: Sequence[Sequence[float]]) -> Blocks | None:
    """Of a row of values for each treatment, seeds in the same order; None: there are too few."""
    k, n = len(values), min(map(len, values), default=0)
    if k < 2 or n < 2:
        return None
    means, seeds = [fmean(row) for row in values], [fmean(one) for one in zip(*values, strict=True)]
    total = fmean(means)
    rest = math.fsum(
        (value - means[i] - seeds[j] + total) ** 2
        for i, row in enumerate(values)
        for j, value in enumerate(row)
    ) / ((k - 1) * (n - 1))  # fmt: skip
    between = math.fsum((seed - total) ** 2 for seed in seeds) / (n - 1) - rest / k
    return Blocks(n, rest, max(0.0, between), (k - 1) * (n - 1))


def difference_in_blocks(
    found: Blocks, differences: Sequence[float], factors: tuple[float, float]
) -> PairedDifference:
    """first - second with its interval and p, from the spread of all treatments of some blocks.

    The differences by seed are in another unit than the blocks' values: theirs are these values
    times `factors`. As far as the factors differ, what seeds have in common stays in. Where one of
    the two is noisier than the rest, the spread of their own differences is the larger, and counts.
    """
    one, other = factors
    mean = fmean(differences)
    pooled = found.rest * (one**2 + other**2) + found.between * (one - other) ** 2
    variance = max(pooled, (std(differences) or 0.0) ** 2)
    sampled, known = variance / found.seeds, _cell_variance(0.0, mean)
    half = _half((1 - CONFIDENCE) / 2, found.df, sampled, known)
    p = min(1.0, 2 * _tail(abs(mean), found.df, sampled, known))
    return PairedDifference(found.seeds, mean, math.sqrt(variance), mean - half, mean + half, p)


def equality(differences: Sequence[float], margin: float) -> float | None:
    """p-value that the mean lies `margin` or more from 0: two one-sided t-tests, the larger p."""
    n, centre, spread = len(differences), fmean(differences), std(differences)
    if spread is None:
        return None
    sampled, known = spread**2 / n, _cell_variance(0.0, *differences, margin)
    return _tail(margin - abs(centre), n - 1, sampled, known)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p-values corrected for their number by Holm's step-down rule, in the order given.

    A test that could not be made (None) stays None but counts: leaving it out after the fact would
    flatter the others.
    """
    order = sorted(
        range(len(p_values)), key=lambda i: math.inf if (p := p_values[i]) is None else p
    )
    corrected: list[float | None] = [None] * len(p_values)
    running = 0.0
    for rank, index in enumerate(order):
        p = p_values[index]
        if p is not None:
            running = max(running, min(1.0, (len(p_values) - rank) * p))
            corrected[index] = running
    return corrected


def paired_power(effect: float, spread: float, n: int, alpha: float = 0.05) -> float:
    """Chance that a two-sided paired t-test with n pairs finds a true mean difference `effect`."""
    critical = stdtrit(n - 1, 1 - alpha / 2)
    shift = abs(effect) / spread * math.sqrt(n)
    # The other tail only matters for a shift near zero; far out, nctdtr underflows to nan there.
    lower = float(nctdtr(n - 1, shift, -critical)) if shift < 3 else 0.0
    return 1.0 - float(nctdtr(n - 1, shift, critical)) + lower


def pairs_needed(effect: float, spread: float, alpha: float = 0.05) -> int | None:
    """Fewest pairs with which a paired t-test finds `effect`; None: no number within reason."""
    if effect == 0:
        return None
    if spread == 0:
        return 2
    counts = range(2, MOST_SEEDS + 1)
    enough = bisect_left(counts, POWER, key=lambda n: paired_power(effect, spread, n, alpha))
    return counts[enough] if enough < len(counts) else None


def more_pairs(differences: Sequence[float], alpha: float = 0.05) -> int | None:
    """How many more seeds would settle an effect of the size and spread seen so far.

    0 when those at hand suffice; None when no spread is known yet or the effect is nil. In a family
    of m tests give alpha / m, the strictest level that Holm's rule may ask for.
    """
    spread = std(differences)
    if spread is None:
        return None
    needed = pairs_needed(fmean(differences), spread, alpha)
    return None if needed is None else max(0, needed - len(differences))
