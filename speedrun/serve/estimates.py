"""Losses and accuracies with their errors: ratios of totals over documents, shares of items.

Documents are what is sampled, so a loss over all tokens is a ratio of two sums over documents, and
its error comes from how documents differ, not tokens, which are alike within a text. The error of a
ratio is that of a mean: by linearisation, document d stands for

    v_d = r + (n / W) (x_d - r w_d)        r = sum x / sum w,  W = sum w

whose mean is r and whose standard error, s(v) / sqrt(n), is the ratio's. For a pair of runs on the
same documents the values are subtracted document by document. So `science/stats.py` does the rest:
Student's t with n - 1 degrees of freedom, and what 32-bit numbers cannot tell apart is no
difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import bdtr, ndtri

from speedrun.science.stats import CONFIDENCE, paired_difference, summarize

Interval = tuple[float, float]
Z = float(-ndtri((1 - CONFIDENCE) / 2))


@dataclass(frozen=True)
class Estimate:
    """A figure, its standard error and its 95% interval; None: one document gives neither."""

    value: float
    stderr: float | None = None
    interval: Interval | None = None


@dataclass(frozen=True)
class Difference(Estimate):
    """A figure less another, and a two-sided p-value that they are equal."""

    p: float | None = None

    @property
    def told_apart(self) -> bool:
        return self.p is not None and self.p < 1 - CONFIDENCE


def _ratio(x: Sequence[float], w: Sequence[float]) -> float:
    return math.fsum(x) / math.fsum(w)


def _linearized(x: Sequence[float], w: Sequence[float]) -> list[float]:
    r, scale = _ratio(x, w), len(x) / math.fsum(w)
    return [r + scale * (a - r * b) for a, b in zip(x, w, strict=True)]


def ratio_of_totals(x: Sequence[float], w: Sequence[float]) -> Estimate:
    """sum x / sum w over documents."""
    r = _ratio(x, w)
    if len(x) < 2 or not math.isfinite(r):
        return Estimate(r)
    found = summarize(_linearized(x, w))
    assert found.std is not None
    assert found.low is not None
    assert found.high is not None
    return Estimate(r, found.std / math.sqrt(found.n), (found.low, found.high))


def difference_of_ratios(
    second: Sequence[float], first: Sequence[float], w: Sequence[float]
) -> Difference:
    """sum second / sum w - sum first / sum w, over the same documents."""
    difference = _ratio(second, w) - _ratio(first, w)
    if len(w) < 2 or not math.isfinite(difference):
        return Difference(difference)
    found = paired_difference(_linearized(second, w), _linearized(first, w))
    assert found.std is not None
    assert found.low is not None
    assert found.high is not None
    interval = (found.low, found.high)
    return Difference(difference, found.std / math.sqrt(found.n), interval, found.p)


def wilson(right: int, n: int) -> Interval:
    """Wilson's score interval for a share: sound for few items, and for all or none right."""
    centre, half = right + Z**2 / 2, Z * math.sqrt(right * (n - right) / n + Z**2 / 4)
    low, high = (centre - half) / (n + Z**2), (centre + half) / (n + Z**2)
    return max(0.0, low), min(1.0, high)


def difference_of_shares(only_second: int, only_first: int, n: int) -> Difference:
    """Of n items answered by both, those that one alone has right.

    The interval is Bonett and Price's (2012): Wald's with one more item on either side, so that it
    has a width even if the two never differ. p is McNemar's, exact.
    """
    gained, lost = (only_second + 1) / (n + 2), (only_first + 1) / (n + 2)
    centre, half = gained - lost, Z * math.sqrt((gained + lost - (gained - lost) ** 2) / (n + 2))
    differ = only_second + only_first
    # P(at most the smaller of the two), were either as likely for each item that differs
    p = min(1.0, 2 * float(bdtr(min(only_second, only_first), differ, 0.5))) if differ else 1.0
    interval = (max(-1.0, centre - half), min(1.0, centre + half))
    return Difference((only_second - only_first) / n, None, interval, p)
