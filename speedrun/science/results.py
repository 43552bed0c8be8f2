"""race.json, ablation.json and tune.json: what was found, written once and read back.

Files of others are welcome: whatever has a default here may be missing. The statistics in race.json
are for its readers; here they always follow from the entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, model_validator

from speedrun.errors import ConfigError
from speedrun.files import write_json
from speedrun.science.compare import METRICS, Entry, Row, comparable, statistics
from speedrun.science.sequential import Verdict
from speedrun.science.space import Budget, Range, Value
from speedrun.train.summary import read_json, validated


class Effect(BaseModel, frozen=True):
    """Of one change on one metric: the mean over seeds of (changed - recipe).

    Where a pair lacks its number there is no effect, and `n` of `of` pairs have one.
    """

    switch: str
    metric: str = "val_loss"
    n: int | None = None
    of: int | None = None
    effect: float | None
    std: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    more_seeds: int | None = None
    p_holm: float | None = None
    p_equal: float | None = None  # of "a margin or more from 0", corrected like p_holm
    decided: bool | None = None
    verdict: Verdict | None = None  # helps, hurts, equal (within the margin) or undecided
    note: str = ""


class Race(BaseModel, frozen=True):
    kind: str = "race"
    track: str | None = None
    target: float | None = None
    seeds: int | None = None
    tuned: str | None = None  # the budget that each recipe was tuned with before
    finished: bool = False  # the shortest runs whose last loss reaches the target
    until: str | None = None  # as asked for; None: the number of seeds was fixed beforehand
    stopped: str | None = None  # what ended it: decided, stuck, time or seeds
    alpha: float | None = None  # of the effects
    margin: float | None = None  # share of tokens within which effects may be called equal
    jobs: int = 1  # runs at a time; of more than one no seconds are kept
    command: str | None = None
    dataset_fingerprint: str | None = None
    recipes: tuple[str, ...] = ()  # in order; ratios are to the first
    entries: tuple[Entry, ...]
    effects: tuple[Effect, ...] = ()  # of each recipe against the first, in log tokens to target
    notes: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[str, ...]:
        return self.recipes or tuple(dict.fromkeys(entry.recipe for entry in self.entries))

    def statistics(self) -> dict[str, dict[str, Row]]:
        return statistics(self.order, self.entries, comparable(METRICS, self.jobs))

    def to_the_one_before(self) -> dict[str, Row]:
        """Tokens to target by recipe from the second on, with the ratio to the one before it."""
        pairs = ((pair, statistics(pair, self.entries)) for pair in pairwise(self.order))
        return {pair[1]: rows[pair[1]]["tokens_to_target"] for pair, rows in pairs}

    def verdicts(self) -> list[str]:
        """On each recipe against the first, where seeds were added until they were decided."""
        found = []
        for effect in self.effects:
            ends = (effect.effect, effect.low, effect.high)
            ratio, low, high = ("-" if end is None else f"{math.exp(end):.3f}" for end in ends)
            verdict = {
                "helps": "needs more tokens", "hurts": "needs fewer tokens",
                "equal": f"equal within {100 * (self.margin or 0):g}%",
            }.get(effect.verdict or "", effect.note or "undecided")  # fmt: skip
            p = "-" if effect.p_holm is None else f"{effect.p_holm:.2g}"
            found.append(
                f"{effect.switch}: {ratio} [{low}, {high}] times the tokens of {self.order[0]}, "
                f"{effect.n} seeds, p {p}: {verdict}"
            )
        return found

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(entry.run for entry in self.entries if entry.run is not None)

    def write(self, path: Path) -> None:
        table = {
            recipe: {metric: row.as_dict() for metric, row in rows.items()}
            for recipe, rows in self.statistics().items()
        }
        write_json(path, self.model_dump(mode="json") | {"statistics": table})


class Ablation(BaseModel, frozen=True):
    kind: str = "ablation"
    recipe: str | None = None
    track: str | None = None
    seeds: int | None = None
    alpha: float | None = None
    margin: float | None = None  # in nats: effects within it may be called equal
    until: str | None = None  # as asked for; None: the number of seeds was fixed beforehand
    stopped: str | None = None  # what ended it: decided, stuck, time or seeds
    seconds: float | None = None  # that the command took
    made: int | None = None  # runs that it made in them; the others were there
    jobs: int = 1  # runs at a time; of more than one no seconds are compared
    command: str | None = None
    dataset_fingerprint: str | None = None
    settings: dict[str, tuple[str, ...]] = {}  # by switch: the overrides key=value it stands for
    effects: tuple[Effect, ...]
    # The last loss by recipe or switch and by seed, from which the effects on it follow.
    losses: dict[str, dict[int, float | None]] = {}
    runs: tuple[str, ...] = ()  # folders relative to the file

    def write(self, path: Path) -> None:
        write_json(path, self.model_dump(mode="json"))


Agreement = Literal["agree", "differ", "opposite", "open"]


def agreement(
    ablations: Sequence[Ablation],
) -> dict[str, tuple[list[Effect | None], Agreement]]:
    """By switch: its effect on the last loss in each ablation, and whether the verdicts agree.

    Open: not decided everywhere. Differ: equal here, an effect there. Opposite: helps here, hurts
    there.
    """
    tables = [
        {effect.switch: effect for effect in one.effects if effect.metric == "val_loss"}
        for one in ablations
    ]
    found: dict[str, tuple[list[Effect | None], Agreement]] = {}
    for switch in dict.fromkeys(switch for table in tables for switch in table):
        effects = [table.get(switch) for table in tables]
        verdicts = {one.verdict or "undecided" if one else "undecided" for one in effects}
        if "undecided" in verdicts:
            word: Agreement = "open"
        elif len(verdicts) == 1:
            word = "agree"
        else:
            word = "opposite" if {"helps", "hurts"} <= verdicts else "differ"
        found[switch] = effects, word
    return found


class Trial(BaseModel, frozen=True):
    """One point of a search with the final losses of its runs, one a seed."""

    number: int  # 0: the recipe as it stands
    values: dict[str, Value]
    box: float | None = None  # the share of each range that it was taken from
    losses: tuple[float | None, ...]  # None: not finite; of a finalist more than of the others
    loss: float | None  # their mean
    diverged: bool = False  # a loss was not finite, so the trial is worse than any other
    runs: tuple[str, ...] = ()  # folders relative to the file


class Tuning(BaseModel, frozen=True):
    """What a search cost, where it looked, on which seeds and rows, and all it tried."""

    kind: str = "tuning"
    recipe: str
    track: str
    over: tuple[Range, ...]
    budget: Budget
    seconds: float | None = None  # of a budget of time: how much of it is gone
    finalists: int = 0  # of the best trials, which are chosen from by the mean of more seeds
    seeds: tuple[int, ...]
    rows: str  # of validation, apart from those of a race
    track_hash: str = ""  # of what the track sets
    settings: tuple[str, ...] = ()  # overrides key=value of every run
    stated: dict[str, Any] = {}  # what the recipe has that the track by itself has not
    jobs: int = 1  # runs at a time
    command: str | None = None
    dataset_fingerprint: str | None = None
    file: str  # the recipe that states the best values, relative to this file
    trials: tuple[Trial, ...]
    stopped: int = 0  # trials that were under way when the time was over
    best: int | None = None  # number of the trial with the lowest loss; None: all diverged

    @model_validator(mode="after")
    def _check(self) -> Tuning:
        keys = {one.key for one in self.over}
        for trial in self.trials:
            if missing := keys - trial.values.keys():
                raise ValueError(f"trial {trial.number} has no value of {min(missing)}")
        return self

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(run for trial in self.trials for run in trial.runs)

    @property
    def ranked(self) -> list[Trial]:
        """The best first; the earlier of equals, so that values are changed for a reason.

        Finalists come before those that were not run again: a single loss flatters itself.
        """

        def place(one: Trial) -> tuple[float, ...]:
            return (math.inf,) if one.loss is None else (-len(one.losses), one.loss)

        return sorted(self.trials, key=place)

    @property
    def best_trial(self) -> Trial | None:
        return next((trial for trial in self.trials if trial.number == self.best), None)

    @property
    def as_it_stands(self) -> Trial | None:
        """The recipe itself, unless the time was over before it had come to its end."""
        return next((trial for trial in self.trials if trial.number == 0), None)

    @property
    def edges(self) -> tuple[str, ...]:
        """Keys whose best value lies at the end of its range, or outside of it."""
        if self.best_trial is None:
            return ()
        values = self.best_trial.values
        return tuple(one.key for one in self.over if one.at_edge(values[one.key]))

    def write(self, path: Path) -> None:
        late = {"finalists", "track_hash"}  # which older files do without
        unset = {key for key in late if not getattr(self, key)}
        write_json(path, self.model_dump(mode="json", exclude=unset))


def read_result(path: Path) -> Race | Ablation | Tuning:
    found = read_json(path, ConfigError)
    what = "a result of a race, an ablation or a tuning"
    kinds: dict[str, type[Race | Ablation | Tuning]] = {
        "entries": Race, "effects": Ablation, "trials": Tuning,
    }  # fmt: skip
    for key, kind in kinds.items():
        if isinstance(found, dict) and isinstance(found.get(key), list):
            return validated(kind, found, path, what, ConfigError)
    raise ConfigError(
        f"{path} is not {what}: it has no list of entries, effects or trials; name "
        "a file that race, ablate or tune wrote"
    )
