"""Recipes compared over their seeds: the numbers of every table and figure that compares runs.

A race's tables, race.json and the page all take their means and ratios from `statistics`, so that
one question has one answer. A recipe of which a seed missed the target has no mean: the mean over
the seeds that reached it would flatter a recipe whose slow seeds did not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel

from speedrun.science.stats import ratio_of_means, summarize

TIMES = ("seconds_to_target", "wall_seconds_to_target")
TO_TARGET = ("tokens_to_target", "steps_to_target", *TIMES)
PUBLIC = "first_validation_tokens"  # tokens to target by the public speedrun's rule
METRICS = (*TO_TARGET, PUBLIC, "val_loss", "test_loss", "peak_memory_bytes")
NO_RATIO = ("val_loss", "test_loss")  # a loss has no natural zero


class Entry(BaseModel, frozen=True):
    """What one run of a race or an ablation needed; None: the target was not reached, or NaN.

    A run that shared the machine with others has no seconds either.
    """

    recipe: str
    seed: int
    run: str | None = None  # its folder, relative to the file of results
    tokens_to_target: int | None = None  # where the validations cross the target
    steps_to_target: float | None = None
    seconds_to_target: float | None = None
    wall_seconds_to_target: float | None = None
    cell_steps: int | None = None  # between the two validations around the crossing
    first_validation_tokens: int | None = None  # by the public rule
    val_loss: float | None = None
    test_loss: float | None = None  # of the last weights, on text that nobody chose by
    params: int | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class Row:
    """One metric of one recipe: mean, deviation and 95% intervals, where all `of` seeds have it.

    The ratio is to the first recipe. Its interval is Fieller's, from the differences seed by seed
    ("paired") or from two independent samples with Welch's degrees of freedom ("Welch").
    """

    n: int  # seeds that have the number
    of: int
    mean: float | None = None
    std: float | None = None
    low: float | None = None
    high: float | None = None
    cell: float | None = None  # width of the cells that the values lie in, where they do
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    ratio_method: Literal["paired", "Welch"] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Without the mean or the ratio where there is none."""
        of_mean = ("mean", "std", "low", "high")
        return {
            key: value
            for key, value in asdict(self).items()
            if not (key in of_mean and self.mean is None)
            and not (key.startswith("ratio") and self.ratio is None)
            and not (key == "cell" and self.cell is None)
        }


def comparable(metrics: Sequence[str], jobs: int) -> tuple[str, ...]:
    """Those of `metrics` that compare runs made `jobs` at a time.

    Runs that share a machine slow each other down, the more the more of them are under way.
    """
    return tuple(metric for metric in metrics if jobs == 1 or metric not in TIMES)


def statistics(
    recipes: Sequence[str], entries: Sequence[Entry], metrics: Sequence[str] = METRICS
) -> dict[str, dict[str, Row]]:
    """By recipe and metric; ratios are to the first recipe."""
    runs = {
        recipe: sorted((e for e in entries if e.recipe == recipe), key=lambda e: e.seed)
        for recipe in recipes
    }
    return {
        recipe: {metric: _row(runs[recipe], runs[recipes[0]], metric) for metric in metrics}
        for recipe in recipes
    }


def _row(runs: Sequence[Entry], first: Sequence[Entry], metric: str) -> Row:
    values, base = _known(runs, metric), _known(first, metric)
    if not values or len(values) < len(runs):
        return Row(len(values), len(runs))
    width, base_width = cell_width(runs, metric), cell_width(first, metric)
    row = Row(of=len(runs), cell=width or None, **vars(summarize(values, width)))
    # A target that the first recipe meets before its first step leaves nothing to divide by.
    if metric in NO_RATIO or len(base) < len(first) or not any(base):
        return row
    seeds = [run.seed for run in runs]
    paired = seeds == [run.seed for run in first] and len(set(seeds)) == len(seeds)
    ratio = ratio_of_means(values, base, paired=paired, widths=(width, base_width))
    return replace(
        row, ratio=ratio.ratio, ratio_low=ratio.low, ratio_high=ratio.high,
        ratio_method="paired" if paired else "Welch",
    )  # fmt: skip


def shares_within(
    names: Sequence[str], tables: Sequence[Mapping[str, float]]
) -> dict[str, list[tuple[float, float]]]:
    """Performance profiles: the share of tables on which each is within a factor of the best.

    Points (factor, share), one for each table in which it has a figure.
    """
    factors: dict[str, list[float]] = {name: [] for name in names}
    for table in tables:
        best = min(table.values(), default=0.0)
        for name, figure in table.items():
            factors[name].append(figure / best)
    return {
        name: [(factor, (rank + 1) / len(tables)) for rank, factor in enumerate(sorted(found))]
        for name, found in factors.items()
    }


def cell_width(runs: Sequence[Entry], metric: str) -> float:
    """How wide the cells are that a metric's values lie in (root of the mean square); 0: none.

    Steps, tokens and seconds of a run go through the cell in the same proportion.
    """
    if metric not in (*TO_TARGET, PUBLIC):
        return 0.0
    crossing = "tokens_to_target" if metric == PUBLIC else metric  # which is at the cell's end
    widths = [
        float(value) * run.cell_steps / run.steps_to_target
        for run in runs
        if (value := getattr(run, crossing)) and run.cell_steps and run.steps_to_target
    ]
    return math.sqrt(fmean(width**2 for width in widths)) if widths else 0.0


def _known(runs: Sequence[Entry], metric: str) -> list[float]:
    return [float(value) for run in runs if (value := getattr(run, metric)) is not None]
