"""Bets on the signs of differences: fair whatever their distribution, so stakes may be watched.

The bet is on signs. If a switch does nothing, the two runs of a pair could as well have changed
places, so whatever the size of their difference, it is above 0 as often as below. A bet of b on
"above" multiplies the stake by e^b / cosh b if it is and by e^-b / cosh b if it is not, which is 1
on average. Large differences say more than small ones, so b is the difference in units of the root
mean square of all so far, itself included, times a factor. Which factor is best depends on the
effect; a seventh of the stake is on each of seven. Since a size tells nothing of its sign, this
holds for differences of whatever distribution and spread, as long as it is the same to both sides.

Against another mean m the bet is on the sign of (difference - m), and takes for granted that
differences lie alike on both sides of their mean. A bet on "below m" loses on average where the
mean is above m: of two differences alike far from it, the one above m is the farther from m, so it
costs more than the other wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

FACTORS = 2.0 ** np.arange(-1.0, 2.5, 0.5)  # 0.5 to 4: of a difference as large as is usual
LARGEST_LOG = 700.0  # e^700 and e^-700 are floats, so no p-value is 0 and no stake infinite
DISTANCES = np.geomspace(1e-3, 1e6, 64)  # from the mean, in standard errors, for intervals
HALVINGS = 40

Floats = NDArray[np.float64]


@lru_cache
def fewest_pairs(alpha: float, switches: int, *, equal: bool = False) -> int:
    """How many it takes at least to decide one of so many switches, all of them on one side.

    A pair doubles a stake at most. An effect takes bets on both sides, half the stake on each; to
    call it equal takes bets on one side, and enough pairs for an interval.
    """
    wanted = math.log((1 if equal else 2) * max(1, switches) / alpha)
    ones = log_stakes(np.ones(math.ceil(4 * wanted) + 8))[0]
    found = 1 + int(np.argmax(ones >= wanted))
    return max(found, fewest_pairs(alpha, 1)) if equal else found


def log_stakes(differences: ArrayLike, mean: ArrayLike = 0.0) -> tuple[Floats, Floats]:
    """Logs of the stakes on "above" and on "below" a mean after each difference.

    Of several means, in a column, each has a row.
    """
    off = np.asarray(differences, np.float64) - np.asarray(mean, np.float64)
    largest = np.abs(off).max(axis=-1, initial=0.0, keepdims=True)  # so that no square overflows
    off = np.divide(off, largest, out=np.zeros_like(off), where=largest > 0)
    usual = np.sqrt(np.cumsum(off * off, axis=-1) / np.arange(1, off.shape[-1] + 1))
    off = np.divide(off, usual, out=np.zeros_like(off), where=usual > 0)
    bets = off[..., None] * FACTORS
    size = np.abs(bets)
    log_cosh = size + np.log1p(np.exp(-2 * size)) - math.log(2)
    won = np.cumsum(bets, axis=-2)
    paid = np.cumsum(log_cosh, axis=-2)
    above, below = (np.logaddexp.reduce(side - paid, axis=-1) for side in (won, -won))
    return above - math.log(len(FACTORS)), below - math.log(len(FACTORS))


def log_stake(differences: ArrayLike, mean: ArrayLike = 0.0) -> Floats:
    """Half of it on each side: against a true mean of `mean`, after each difference."""
    half = np.logaddexp(*log_stakes(differences, mean)) - math.log(2)
    return np.asarray(np.minimum(half, LARGEST_LOG))


def evidence(differences: Sequence[float], mean: float = 0.0) -> float:
    """The largest stake against `mean` at any look, the beginning of 1 included.

    1 / evidence is a p-value however often and for whatever reason one looked.
    """
    return math.exp(max(0.0, log_stake(checked(differences), mean).max(initial=0.0)))


def equality_evidence(differences: Sequence[float], margin: float) -> float:
    """The largest stake at any look against a true mean of `margin` or more from 0.

    Of a look counts the smaller of the stakes on "below the margin" and "above its negative".
    """
    return math.exp(max(0.0, log_equal(checked(differences), margin).max(initial=0.0)))


def log_equal(differences: Floats, margin: float) -> Floats:
    below = log_stakes(differences, margin)[1]
    above = log_stakes(differences, -margin)[0]
    return np.asarray(np.minimum(np.minimum(below, above), LARGEST_LOG))


def checked(differences: Sequence[float]) -> Floats:
    for n, value in enumerate(differences, start=1):
        if not math.isfinite(value):
            raise ValueError(f"difference {n} is {value}: a mean of it says nothing")
    return np.asarray(differences, np.float64)


@lru_cache(maxsize=1 << 14)
def not_excluded(differences: tuple[float, ...], alpha: float) -> tuple[float, float] | None:
    """The outermost means against which the stake is below 1 / alpha; None: no bound was found.

    They are sought among distances from the mean and, where most differences are alike and some
    are not, among and between the differences themselves; then by halving.
    """
    wanted, n = -math.log(alpha), len(differences)
    if n < fewest_pairs(alpha, 1):
        return None
    row = np.sort(np.asarray(differences))
    scale = float(np.abs(row).max()) or 1e-290
    row, given = row / scale, np.asarray(differences) / scale  # so that no square overflows
    step = max(float(row.std()) / math.sqrt(n), 2.0**-52)
    away = np.concatenate([-DISTANCES, DISTANCES]) * step + row.mean()
    between = (row[1:] + row[:-1]) / 2
    means = np.unique(np.concatenate([away, row, between, [np.median(row), row.mean()]]))
    held = np.flatnonzero(log_stake(given, means[:, None])[:, -1] < wanted)
    if not len(held) or held[0] == 0 or held[-1] == len(means) - 1:
        return None
    inner, outer = means[[held[0], held[-1]]], means[[held[0] - 1, held[-1] + 1]]
    for _ in range(HALVINGS):
        middle = (inner + outer) / 2
        inside = log_stake(given, middle[:, None])[:, -1] < wanted
        inner, outer = np.where(inside, middle, inner), np.where(inside, outer, middle)
    return float(outer[0]) * scale, float(outer[1]) * scale
