"""The published validation curves of the speedrun's records, and how far a run is from them.

`published.csv` holds, for records 4 to 18 and each validation step, the number of public logs, the
mean and standard deviation of their validation loss, and the mean training seconds (8 x H100, first
ten steps untimed). The row of a record's last step also lists the final losses its authors
published, from which their p-values can be recomputed; for records 14 and 18 that list (40 and 80
runs) is longer than the set of full logs (38 and 1).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from speedrun.config.experiment import differences
from speedrun.config.resolve import resolve
from speedrun.config.schema import Config

BATCH_TOKENS = 524_288  # per step, in every record of the table
# Records with a single log say nothing about spread. These borrow it from a neighbour that trains
# the same way at the same steps: record 17's 1261 runs end with 0.0018, record 16's logs 0.0024.
SPREAD_OF: Mapping[int, int] = {12: 13, 17: 16, 18: 16}
# What a run may set as it likes and still be laid over its record: seed, length, target, and when
# it validates.
FREE = ("train", "validation.every")


@dataclass(frozen=True)
class Point:
    step: int
    n: int
    mean: float
    std: float | None
    seconds: float


@dataclass(frozen=True)
class Curve:
    """One record: its points in order of step, and the final losses of its published runs."""

    record: int
    points: tuple[Point, ...]
    final_losses: tuple[float, ...]

    @property
    def steps(self) -> int:
        return self.points[-1].step


@dataclass(frozen=True)
class Deviation:
    """A run against its record at one step; `deviations` is None where no spread is known."""

    step: int
    loss: float
    published: float
    std: float | None
    deviations: float | None


@cache
def curves() -> dict[int, Curve]:
    points: dict[int, list[Point]] = {}
    finals: dict[int, tuple[float, ...]] = {}
    with files("speedrun.science").joinpath("published.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            record = int(row["record"])
            std = float(row["sd"]) if row["sd"] else None
            point = Point(int(row["step"]), int(row["n"]), float(row["mean"]), std,
                          float(row["seconds"]))  # fmt: skip
            points.setdefault(record, []).append(point)
            if row["losses"]:
                finals[record] = tuple(float(loss) for loss in row["losses"].split())
    return {record: Curve(record, tuple(found), finals[record]) for record, found in points.items()}


def record_of(recipe: str, track: str) -> int | None:
    """The record whose published curve a run can be laid over: `record-NN` on track `small`.

    Names promise nothing about values: ask `set_otherwise` what differs.
    """
    match = re.fullmatch(r"record-(\d+)", recipe)
    number = int(match[1]) if match and track == "small" else None
    return number if number in curves() else None


def set_otherwise(config: Config, record: int) -> list[str]:
    """Keys in which a run is another experiment than the record's own recipe on `small`."""
    own = resolve(f"record-{record:02d}", "small").config
    # Without a folder the data is built from `data.sources`: not what the record was trained on.
    elsewhere = ["data.dir"] if not config.data.dir else []
    return elsewhere + [found.key for found in differences(own, config, but=FREE)]


def spread_at(record: int, step: int) -> float | None:
    """Standard deviation of one run at a step of the record's curve; the last step is the end's."""
    lender = curves()[SPREAD_OF.get(record, record)]
    if step == curves()[record].steps:
        return lender.points[-1].std
    return next((point.std for point in lender.points if point.step == step), None)


def compare(record: int, validations: Sequence[tuple[int, float]]) -> list[Deviation]:
    """A run's (step, loss) against the record's mean, at the steps both have."""
    published = {point.step: point.mean for point in curves()[record].points}
    found = []
    for step, loss in validations:
        if step in published:
            mean, spread = published[step], spread_at(record, step)
            deviations = (loss - mean) / spread if spread else None
            found.append(Deviation(step, loss, mean, spread, deviations))
    return found
