"""The table of the optimizer track on one text: what was run, and what follows from it.

A file holds the final losses of every entry by length and seed. Everything that the table says is
computed from them here, so whoever doubts a verdict has all that it was made of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, FiniteFloat, PositiveInt

from speedrun.errors import ConfigError
from speedrun.files import write_json
from speedrun.science.compare import Entry, Row, statistics
from speedrun.science.finish import Search
from speedrun.science.rule import Cells, Line, Losses, Pair, around, least, line_of, pairs
from speedrun.science.spread import Sigma, pooled
from speedrun.train.summary import read_json, validated

GRID = 1.03  # from one length to the next
LONGEST = 4  # of the track's own length
METRICS = ("steps_to_target",)
RIVAL = "adamw"  # whom the others are compared with, where it is there


class Tuned(BaseModel, frozen=True):
    """What a search of the entry's values found, and what it cost."""

    track: str
    budget: str
    trials: int
    finalists: int = 0  # of these, chosen from by the mean of more seeds
    over: tuple[str, ...] = ()  # the ranges that were searched
    values: dict[str, float]  # as the runs have them
    loss: float | None  # of the best trial, on seeds and rows apart
    before: float | None  # of the recipe as it stood
    edges: tuple[str, ...] = ()  # keys whose best value is at the end of its range


class Timed(BaseModel, frozen=True):
    """One run that had the machine to itself."""

    seed: int
    steps: int
    seconds: float
    peak_memory_bytes: int | None = None


class Rung(BaseModel, frozen=True):
    """One entry: what it is, and the final loss of its runs by number of steps and seed."""

    recipe: str
    why: str = ""
    optimizer: str  # of the hidden matrices: adamw, muon, or the code that is named
    packages: dict[str, str] = {}  # versions of those that the code is from
    settings: dict[str, Any] = {}  # what its config has that the track by itself has not
    tuned: Tuned | None = None
    code_sha256: str = ""  # of the trainer
    machine: dict[str, Any] = {}  # that the last of its runs was made on
    losses: dict[PositiveInt, dict[int, FiniteFloat | None]]
    state_bytes: int | None = None  # of all optimizers of a run, as a checkpoint holds them
    timed: tuple[Timed, ...] = ()


class Ladder(BaseModel, frozen=True):
    """All entries on one text."""

    kind: str = "ladder"
    track: str
    target: FiniteFloat
    track_hash: str = ""  # of what the track sets
    sigma: Annotated[float, Field(gt=0)]  # of a final loss between seeds, as the track states it
    own_steps: PositiveInt  # the length of the grid that all others are counted from
    grid: Annotated[float, Field(gt=1.001, le=10)] = GRID
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    dataset_fingerprint: str
    clock: dict[str, Any] = {}  # the machine that all seconds are from
    commands: tuple[str, ...] = ()
    rungs: tuple[Rung, ...] = ()

    @property
    def tuned_here(self) -> bool:
        """Whether rows were tuned on this very text."""
        return any(rung.tuned and rung.tuned.track == self.track for rung in self.rungs)

    def rung(self, recipe: str) -> Rung | None:
        return next((rung for rung in self.rungs if rung.recipe == recipe), None)

    def with_rung(self, new: Rung) -> Ladder:
        """In the place of an older one of that name, or at the end."""
        others = [new if rung.recipe == new.recipe else rung for rung in self.rungs]
        there = self.rung(new.recipe) is not None
        return self.model_copy(update={"rungs": (*others, *(() if there else (new,)))})

    def search(self, seed: int, losses: Mapping[int, Mapping[int, float | None]]) -> Search:
        """One seed of an entry, as far as it has been run."""
        found = Search(self.own_steps, LONGEST * self.own_steps, self.target, grid=self.grid)
        for steps, by_seed in losses.items():
            near = round(math.log(steps / self.own_steps) / math.log(self.grid))
            for place in range(near - 9, near + 10):  # short lengths fall together
                if seed in by_seed and found.steps(place) == steps:
                    found.runs[place] = Entry(recipe="", seed=seed, val_loss=by_seed[seed])
        return found

    def write(self, path: Path) -> None:
        write_json(path, self.model_dump(mode="json") | {"verdicts": Verdicts(self).as_dict()})


def file_of(track: str, out: Path) -> Path:
    return out / f"ladder-{Path(track).stem}.json"


def read_ladder(path: Path) -> Ladder:
    return validated(
        Ladder, read_json(path, ConfigError), path, "a table of optimizers", ConfigError
    )


def cells_of(searches: Sequence[Search]) -> Cells:
    """By place: the losses of all seeds, where all of them have been run."""
    common = set.intersection(*(set(search.runs) for search in searches)) if searches else set()
    return {place: [search.runs[place].val_loss for search in searches] for place in sorted(common)}


def lengths_of(searches: Sequence[Search]) -> dict[int, Losses]:
    """The same by number of steps, in which short lengths fall together."""
    cells = cells_of(searches)
    return {searches[0].steps(place): losses for place, losses in cells.items()}


@dataclass(frozen=True)
class Result:
    """What the table says of one entry."""

    steps: int | None  # by the rule; None: not found, or not yet
    crossing: Row  # steps at which its seeds cross the target, and the ratio to the rival's
    fewer_than: tuple[str, ...]  # entries that are decided to need more
    why_not: str = ""  # where a figure is missing


@dataclass(frozen=True)
class Verdicts:
    """All that follows from the losses of a table."""

    ladder: Ladder

    @cached_property
    def searches(self) -> dict[str, list[Search]]:
        return {
            rung.recipe: [self.ladder.search(seed, rung.losses) for seed in self.ladder.seeds]
            for rung in self.ladder.rungs
        }

    @cached_property
    def spread(self) -> Sigma | None:
        """Between the seeds of these very runs, to hold against what the track states.

        Runs of one seed are alike, so their degrees of freedom are fewer than they seem.
        """
        return pooled(
            losses
            for searches in self.searches.values()
            for losses in lengths_of(searches).values()
        )

    @cached_property
    def places(self) -> dict[str, int | None]:
        """By entry: where on the grid its result by the rule lies."""
        return {
            recipe: least(cells_of(searches), self.ladder.target, self.ladder.sigma)
            for recipe, searches in self.searches.items()
        }

    @cached_property
    def lines(self) -> dict[str, Line | None]:
        """By entry, through the lengths around its result."""
        target = self.ladder.target
        found = {}
        for recipe, searches in self.searches.items():
            cells, place = cells_of(searches), self.places[recipe]
            wanted = around(place, cells, target) if place is not None else []
            lengths = {searches[0].steps(one): cells[one] for one in wanted if one in cells}
            found[recipe] = line_of(lengths, target)
        return found

    @cached_property
    def crossings(self) -> dict[str, list[Entry]]:
        """By entry and seed; without a figure where the entry has none."""
        found = {}
        for recipe, line in self.lines.items():
            logs = line.crossings if line else [None] * len(self.ladder.seeds)
            found[recipe] = [
                Entry(recipe=recipe, seed=seed, steps_to_target=None if x is None else math.exp(x))
                for seed, x in zip(self.ladder.seeds, logs, strict=True)
            ]
        return found

    @cached_property
    def pairs(self) -> list[Pair]:
        return pairs(self.lines)

    @cached_property
    def rival(self) -> str:
        return RIVAL if RIVAL in self.searches else next(iter(self.searches), RIVAL)

    @cached_property
    def results(self) -> dict[str, Result]:
        """By entry, the one with the fewest steps first."""
        if not self.searches:
            return {}
        order = [self.rival, *(name for name in self.searches if name != self.rival)]
        entries = [entry for name in order for entry in self.crossings[name]]
        rows = statistics(order, entries, METRICS)
        found = {}
        for name in order:
            place = self.places[name]
            worse = (pair.second if pair.first == name else pair.first
                     for pair in self.pairs if pair.fewer == name)  # fmt: skip
            found[name] = Result(
                steps=None if place is None else self.searches[name][0].steps(place),
                crossing=rows[name][METRICS[0]],
                fewer_than=tuple(worse),
                why_not=self._why_not(name),
            )
        return dict(sorted(found.items(), key=_by_steps))

    def _why_not(self, name: str) -> str:
        """Why an entry has no steps or no crossing; empty if it has both."""
        searches = self.searches[name]
        if self.places[name] is None:
            lacking = (one.why_not for one in searches if one.runs and not one.done)
            return next(lacking, "no length passes the rule so far")
        if self.lines[name] is not None:
            return ""
        diverged = {
            one.steps(place) for one in searches for place, run in one.runs.items()
            if run.val_loss is None
        }  # fmt: skip
        if diverged:
            return f"a run diverged with {', '.join(map(str, sorted(diverged)))} steps"
        return "its losses do not fall through the target"

    def as_dict(self) -> dict[str, Any]:
        """For the file, beside what it follows from."""
        if not self.ladder.rungs:
            return {}
        return {
            "spread": self.spread.value if self.spread else None,
            "steps": {name: result.steps for name, result in self.results.items()},
            "crossings": {name: result.crossing.as_dict() for name, result in self.results.items()},
            "decided": [
                [pair.fewer, pair.second if pair.fewer == pair.first else pair.first]
                for pair in self.pairs if pair.fewer
            ],
        }  # fmt: skip


def _by_steps(item: tuple[str, Result]) -> float:
    result = item[1]
    return result.crossing.mean or result.steps or math.inf
