"""The optimizer track's rule: the least number of steps whose runs end below the target for sure.

Runs of one length, schedule finished, a seed each, pass if

    (target - mean) sqrt(n) >= 3.09 sigma

as on the public optimizer track, where 3.09 is what a normal exceeds once in a thousand. There
sigma, the standard deviation of a final loss between seeds, is known from many runs. Here it is
pooled over all lengths of all entries of a table, each taken around its own mean. As long as that
leaves fewer than 30 degrees of freedom, Student's t with as many stands in place of 3.09.

An entry's result is the shortest length of a grid that passes while the next shorter one does not:
the same length for all seeds, so nobody stops a run where it happens to look good.

Pairs of entries are compared by the lengths at which each seed's own losses cross the target, in
logarithms and seed by seed, the spread pooled over all entries of a text (`stats.py:
all_differences`), with Holm's correction over all its pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

from scipy.special import stdtrit

from speedrun.science.compare import Entry
from speedrun.science.stats import PairedDifference, all_differences, holm

Z = 3.09
LEVEL = 0.001  # the chance that a standard normal is above Z
ENOUGH = 30  # degrees of freedom from which on sigma counts as known
ALPHA = 0.05  # of the decisions between entries

Losses = Sequence[float | None]  # of the seeds of one length; None: not finite
Cells = Mapping[int, Losses]  # by the place of a length on the grid, all seeds of each


class Sigma(NamedTuple):
    """Deviation of one final loss between seeds, and the degrees of freedom it was found with."""

    value: float
    df: int

    @property
    def factor(self) -> float:
        """How many standard errors a mean must lie below the target."""
        return Z if self.df >= ENOUGH else -float(stdtrit(self.df, LEVEL))

    def margin(self, n: int) -> float:
        """How far below the target the mean of n losses must lie."""
        return self.factor * self.value / math.sqrt(n)


def pooled(cells: Iterable[Losses]) -> Sigma | None:
    """Over cells that each have a mean of their own; None: none has two finite losses."""
    squares, df = 0.0, 0
    for losses in cells:
        known = [loss for loss in losses if loss is not None]
        if len(known) > 1:
            centre = fmean(known)
            squares += math.fsum((loss - centre) ** 2 for loss in known)
            df += len(known) - 1
    return Sigma(math.sqrt(squares / df), df) if df else None


def passes(losses: Losses, target: float, sigma: Sigma | None) -> bool:
    """Whether runs of one length are below the target by the rule; one that diverged never is."""
    known = [loss for loss in losses if loss is not None]
    if sigma is None or not known or len(known) < len(losses):
        return False
    return target - fmean(known) >= sigma.margin(len(known))


def least(cells: Cells, target: float, sigma: Sigma | None) -> int | None:
    """The shortest place that passes while its shorter neighbour does not; None: not known yet."""
    passed = {place: passes(losses, target, sigma) for place, losses in cells.items()}
    return min(
        (place for place, good in passed.items() if good and passed.get(place - 1) is False),
        default=None,
    )


def next_place(cells: Cells, target: float, sigma: Sigma | None, start: int) -> int | None:
    """Where all seeds must be run next to find `least`, beginning at `start`; None: it is found."""
    place = start
    if place not in cells:
        return place
    if least(cells, target, sigma) is not None:
        return None
    step = -1 if passes(cells[place], target, sigma) else 1
    while place in cells:
        place += step
    return place


@dataclass(frozen=True)
class Pair:
    """Two entries of a text: log of the first's steps over the second's, seed by seed."""

    first: str
    second: str
    difference: PairedDifference | None  # None: seeds of one of them have no figure
    p_holm: float | None

    @property
    def fewer(self) -> str | None:
        """The one that needs fewer steps, if that is decided."""
        if self.difference is None or self.p_holm is None or self.p_holm >= ALPHA:
            return None
        return self.first if self.difference.mean < 0 else self.second


def pairs(entries: Mapping[str, Sequence[Entry]]) -> list[Pair]:
    """All pairs of entries (by name: a run for each seed), corrected for their number."""
    logs, widths = {}, {}
    for name, runs in entries.items():
        steps = [run.steps_to_target for run in sorted(runs, key=lambda run: run.seed)]
        known = [math.log(one) for one in steps if one]
        if known and len(known) == len(steps):
            logs[name], widths[name] = known, _log_cell(runs)
    differences = all_differences(logs, widths) if logs else {}
    names = [*combinations(entries, 2)]
    found = [differences.get(pair) for pair in names]
    p_values = holm([one.p if one else None for one in found])
    return [Pair(*pair, one, p) for pair, one, p in zip(names, found, p_values, strict=True)]


def _log_cell(runs: Sequence[Entry]) -> float:
    """How wide the cells are in which the crossings lie (root of the mean square)."""
    widths = [math.log1p(run.cell_steps / run.steps_to_target)
              for run in runs if run.cell_steps and run.steps_to_target]  # fmt: skip
    return math.sqrt(fmean(width**2 for width in widths)) if widths else 0.0
