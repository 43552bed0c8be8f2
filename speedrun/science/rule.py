"""The optimizer track's rule: the least number of steps whose runs end below the target for sure.

Runs of one length, schedule finished, a seed each, pass if

    (target - mean) sqrt(n) >= 3.09 sigma

as on the public optimizer track, where 3.09 is what a normal exceeds once in a thousand. Sigma, the
standard deviation of a final loss between seeds, is known there from many runs, and so it is here:
each track states what was measured on it once (`spread.py`), so a row is judged by the same number
whether it is made alone or among others.

An entry's result is the shortest length of a grid that passes while the next shorter one does not:
the same length for all seeds, so nobody stops a run where it happens to look good.

That figure moves in steps of the grid, and a seed's loss may rise from one length to the next. So
entries are compared by where a seed's losses cross the target on a straight line over the logarithm
of the length, with one slope for the seeds of an entry. Pairs are decided by the logarithms of
these crossings. Their spread comes from that of losses, which is pooled over all entries of a text
(`stats.py: blocks`), by the slopes; where the two differ from seed to seed by more than that, it is
their own. p-values are corrected over all pairs of a text (Holm).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from speedrun.science.stats import Blocks, PairedDifference, blocks, difference_in_blocks, holm

Z = 3.09  # what a standard normal exceeds once in a thousand
ALPHA = 0.05  # of the decisions between entries
AROUND = (-5, -3, -1, 0, 2)  # places, from the result of the rule

Losses = Sequence[float | None]  # of the seeds of one length; None: not finite
Cells = Mapping[int, Losses]  # by the place of a length on the grid, all seeds of each


def margin(sigma: float, n: int) -> float:
    """How far below the target the mean of n losses must lie."""
    return Z * sigma / math.sqrt(n)


def passes(losses: Losses, target: float, sigma: float) -> bool:
    """Whether runs of one length are below the target by the rule; one that diverged never is."""
    known = [loss for loss in losses if loss is not None]
    if not known or len(known) < len(losses):
        return False
    return target - fmean(known) >= margin(sigma, len(known))


def least(cells: Cells, target: float, sigma: float) -> int | None:
    """The shortest place that passes while its shorter neighbour does not; None: not known yet."""
    passed = {place: passes(losses, target, sigma) for place, losses in cells.items()}
    return min(
        (place for place, good in passed.items() if good and passed.get(place - 1) is False),
        default=None,
    )


def next_place(cells: Cells, target: float, sigma: float, start: int) -> int | None:
    """Where all seeds must be run next to find `least`, beginning at `start`; None: it is found."""
    if least(cells, target, sigma) is not None:
        return None
    place = start
    if place not in cells:
        return place
    step = -1 if passes(cells[place], target, sigma) else 1
    while place in cells:
        place += step
    return place


def around(result: int, cells: Cells, target: float) -> list[int]:
    """The places that an entry's line goes through, once the rule has given its result.

    A mean lies 3.09 standard errors below the target there, which is some places longer than where
    it crosses: so they lie around that, far enough apart to tell the slope. Where losses fall
    slowly shorter ones follow, until a mean is above the target.
    """
    places = [result + offset for offset in AROUND]
    shortest = min(places)
    while shortest in cells and not _above(cells[shortest], target):
        shortest -= 2
        places.append(shortest)
    return sorted(places)


def _above(losses: Losses, target: float) -> bool:
    known = [loss for loss in losses if loss is not None]
    return len(known) < len(losses) or fmean(known) > target


@dataclass(frozen=True)
class Line:
    """Losses of one entry over the logarithm of the steps: a level for each seed, one slope."""

    centre: float  # the mean logarithm
    slope: float
    levels: tuple[float, ...]  # by seed: the loss at the centre
    target: float

    @property
    def crossings(self) -> list[float]:
        """By seed: the logarithm of the steps at which it ends at the target."""
        return [self.centre + (self.target - level) / self.slope for level in self.levels]


def line_of(lengths: Mapping[int, Losses], target: float) -> Line | None:
    """Through the losses by number of steps, all seeds of each.

    None where it is not known: a run diverged, losses do not fall with the length, or the mean does
    not cross the target between the lengths that were run.
    """
    rows = [[loss for loss in losses if loss is not None] for losses in lengths.values()]
    if len(rows) < 2 or [*map(len, rows)] != [*map(len, lengths.values())]:
        return None
    logs = [math.log(steps) for steps in lengths]
    centre, means = fmean(logs), [fmean(row) for row in rows]
    falls = math.fsum((x - centre) * mean for x, mean in zip(logs, means, strict=True))
    slope = falls / math.fsum((x - centre) ** 2 for x in logs)
    if slope >= 0 or not min(logs) <= centre + (target - fmean(means)) / slope <= max(logs):
        return None
    levels = tuple(fmean(seed) for seed in zip(*rows, strict=True))
    return Line(centre, slope, levels, target)


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


def pairs(lines: Mapping[str, Line | None]) -> list[Pair]:
    """All pairs of entries by name, corrected for their number."""
    known = {name: line for name, line in lines.items() if line}
    spread = blocks([line.levels for line in known.values()])
    names = [*combinations(lines, 2)]
    found = [
        _difference(spread, known[one], known[other])
        if spread and one in known and other in known
        else None
        for one, other in names
    ]
    p_values = holm([one.p if one else None for one in found])
    return [Pair(*pair, one, p) for pair, one, p in zip(names, found, p_values, strict=True)]


def _difference(spread: Blocks, one: Line, other: Line) -> PairedDifference:
    differences = [a - b for a, b in zip(one.crossings, other.crossings, strict=True)]
    return difference_in_blocks(spread, differences, (1 / one.slope, 1 / other.slope))
