"""`speedrun tune`: the best values of some keys of a recipe, for an equal and stated budget.

Every trial is a run of the track to the end of its schedule, for a loss half-way predicts little.
It is judged by its final loss on seeds and validation rows that no race uses: what a race finds
then is not what the values were chosen by. `space.py` has the rule of the search. The lowest of
many losses is the luckiest, so the best trials may be run again with further seeds, and the lowest
mean is chosen among these finalists.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w

from speedrun.config.experiment import all_values
from speedrun.config.files import is_path
from speedrun.config.fixed import of_track
from speedrun.config.keys import with_elements, with_lists
from speedrun.config.optimizer import OwnOptions, Role
from speedrun.config.resolve import nest, recipe_value
from speedrun.config.schema import Config
from speedrun.data.dataset import Dataset
from speedrun.data.find import find_dataset
from speedrun.data.splits import VAL
from speedrun.data.validation import BETWEEN, FIRST, LAST, SPREAD, choose_rows, rows_in
from speedrun.errors import ConfigError, DataError, RunError, SpeedrunError
from speedrun.files import write_atomically
from speedrun.limits import cores
from speedrun.science.compare import Entry
from speedrun.science.jobs import (
    LAST_LOSS,
    Job,
    RunSet,
    Say,
    common_dataset,
    config_of,
    plan_jobs,
    refuse_own_keys,
    settings_of,
    this_command,
    track_hash,
)
from speedrun.science.results import Trial, Tuning, read_result
from speedrun.science.searchable import as_overrides, refuse_ranges, usable_values
from speedrun.science.share import ONE_A_CORE, Share, share_machine
from speedrun.science.space import Budget, Range, Values, box_size, point, round_of

RATES: Mapping[Role, int] = {"hidden": 6, "head": 4}  # roles, and how far each way their rates go
MOMENTUM = ("momentum", "betas[0]", "beta1", "beta")  # as optimizers call it
MOMENTA = (0.7, 0.97)
FIRST_SEED = 1000  # a race counts its seeds from 0
FURTHER_SEEDS = 2  # of finalists
OTHER_ROWS = {SPREAD: BETWEEN, BETWEEN: SPREAD, FIRST: LAST, LAST: FIRST}
FRUITLESS = 1000  # points in a row that were all tried before: there are no others

Point = tuple[int, Values]  # with the number of its trial


def default_ranges(config: Config, track: str) -> list[Range]:
    """What a fair tuning of any recipe searches: the rate of the hidden matrices and the head's.

    On a track that fixes all but the optimizer the momentum, too: there nothing else tells entries
    apart.
    """
    found = []
    for role, factor in RATES.items():
        key = rate_key(config, role)
        value = all_values(config)[key]
        low, high = (float(f"{end:.4g}") for end in (value / factor, value * factor))
        found.append(Range(key=key, low=low, high=high, log=True))
    return found + (_momentum_range(config) if of_track(track) else [])


def _momentum_range(config: Config) -> list[Range]:
    """That of the hidden matrices, where it can be told from the name it has."""
    table = f"optimizer.{config.optimizer.table('hidden')}"
    own = ".args" if config.optimizer.is_own("hidden") else ""
    values = with_elements(all_values(config))
    for name in MOMENTUM:
        value = values.get(f"{table}{own}.{name}")
        if isinstance(value, float) and 0 < value < 1:
            low, high = MOMENTA
            return [Range(key=f"{table}{own}.{name}", low=low, high=high)]
    return []


def rate_key(config: Config, role: Role) -> str:
    """The key of a role's learning rate; an optimizer of one's own has it among its arguments."""
    table = f"optimizer.{config.optimizer.table(role)}"
    options = config.optimizer.of(role)
    if not isinstance(options, OwnOptions) or not config.optimizer.is_own(role):
        return f"{table}.lr"
    rate = options.args.get("lr")
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or rate <= 0:
        raise ConfigError(
            f"the learning rate of {options.use} is not known, so it cannot be tuned: state it, "
            f"{table}.args.lr = 0.001, say, or name what is searched (--over of `speedrun tune`)"
        )
    return f"{table}.args.lr"


def tune(
    *,
    recipe: str,
    track: str,
    over: Sequence[Range],
    budget: Budget,
    out: Path,
    say: Say,
    seeds: int = 1,
    finalists: int = 0,
    overrides: Sequence[str] = (),
    jobs_at_once: int | None = None,
) -> Tuning:
    """Search, and write `out/tune.json` and the recipe `out/NAME-tuned.toml`.

    Without `jobs_at_once` one run a core at a time, or as the tuning was begun.
    """
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds} cannot be used: at least 1")
    if finalists < 0 or finalists == 1:
        raise ConfigError(f"--finalists {finalists} cannot be used: 2 at least, or 0 for none")
    refuse_own_keys(overrides, ("train.seed", "train.stop", "machine.jobs"))
    base = config_of(recipe, track, overrides)
    stated = with_elements(all_values(base))
    over = [one.checked(stated) for one in over]
    refuse_ranges(over, base, recipe, track, overrides)
    rows = rows_to_tune_on(base)
    own = {one.key: stated[one.key] for one in over}
    runs = _Runs(
        recipe, track, (*overrides, f"validation.rows:={rows}", *LAST_LOSS), base.recipe,
        range(FIRST_SEED, FIRST_SEED + seeds), out, say,
    )  # fmt: skip
    found = Tuning(
        recipe=base.recipe,
        track=track,
        over=tuple(over),
        budget=budget,
        seconds=None if budget.seconds is None else 0.0,
        finalists=finalists,
        seeds=tuple(range(FIRST_SEED, FIRST_SEED + seeds)),
        rows=rows,
        track_hash=track_hash(track),
        settings=tuple(overrides),
        stated=settings_of(base, track),
        command=this_command(),
        dataset_fingerprint=runs.fingerprint,
        file=f"{base.recipe}-tuned.toml",
        trials=(),
    )
    usable = usable_values(recipe, track, overrides, say)
    first = next_points(found, own, budget.alike(0, max(1, cores() // seeds)), usable)
    runs.share(first, jobs_at_once)
    found = _so_far(found.model_copy(update={"jobs": runs.at_once}), runs, out)
    while (spent := budget.spent(len(found.trials), found.seconds or 0.0)) < 1:
        places = max(1, runs.at_once // seeds)
        points = next_points(found, own, budget.alike(len(found.trials), places), usable)
        if not points:
            say("every value of these ranges that can be used has been tried")
            break
        size = box_size(round_of(spent))
        say(_heading(points, size, found))
        begin = time.monotonic()
        deadline = None if budget.seconds is None else begin + (1 - spent) * budget.seconds
        try:
            new = runs.make(points, size, deadline)
        except BaseException:  # most of all a signal: the time is gone all the same
            _write(_later(found, begin), out)
            raise
        stopped = found.stopped + len(points) - len(new)
        found = _later(found, begin).model_copy(
            update={"trials": (*found.trials, *new), "stopped": stopped}
        )
        found = found.model_copy(update={"best": _best(found)})
        _write(found, out)
    if not found.trials:
        raise RunError(f"no trial came to its end within {budget}; give the tuning more time")
    if finalists:
        found = _choose_again(found, runs, seeds + FURTHER_SEEDS)
    _write(found, out)
    write_recipe(found, recipe, base, out / found.file)
    return found


def _choose_again(found: Tuning, runs: _Runs, seeds: int) -> Tuning:
    """The finalists with so many seeds each, and the best of them."""
    finalists = [one for one in found.ranked[: found.finalists] if not one.diverged]
    points = [(one.number, one.values) for one in finalists]
    new = {one.number: one for one in runs.with_seeds(seeds).make(points, None, None)}
    trials = tuple(
        one.model_copy(update={"box": old.box}) if (one := new.get(old.number)) else old
        for old in found.trials
    )
    found = found.model_copy(update={"trials": trials})
    return found.model_copy(update={"best": _best(found)})


def next_points(
    found: Tuning, own: Values, count: int, usable: Callable[[Values], bool]
) -> list[Point]:
    """The trials that come next; fewer, or none, where no other values are left.

    The number of a trial is that of its point in the sequence, unless whole numbers came twice or
    a point could not be used.
    """
    number, seconds = len(found.trials), found.seconds or 0.0
    size = box_size(round_of(found.budget.spent(number, seconds)))
    best = found.best_trial
    middle = list((best.values if best else own).values())
    tried: list[Values] = [trial.values for trial in found.trials] or [own]
    new: list[Values] = [] if number else [own]
    index, fruitless = max(1, number), 0
    while len(new) < count and fruitless < FRUITLESS:
        values = dict(zip(own, point(found.over, index, size, middle), strict=True))
        index, fruitless = index + 1, fruitless + 1
        if values not in tried:
            tried.append(values)
            if usable(values):
                new.append(values)
                fruitless = 0
    return list(enumerate(new, start=number))


class _Runs:
    """The runs of a tuning: those of a trial by the number and values of it."""

    def __init__(
        self, recipe: str, track: str, words: Sequence[str], name: str, seeds: Sequence[int],
        out: Path, say: Say,
    ) -> None:  # fmt: skip
        self._recipe, self._track, self._words = recipe, track, tuple(words)
        self._name, self._seeds, self._say = name, seeds, say
        self._share = Share()
        self.fingerprint = common_dataset(self.jobs([(0, {})]))
        self._set = RunSet(out, self.fingerprint)

    def with_seeds(self, count: int) -> _Runs:
        """The same with so many seeds, those of before among them."""
        found = copy.copy(self)
        found._seeds = range(FIRST_SEED, FIRST_SEED + count)
        return found

    @property
    def at_once(self) -> int:
        return self._share.jobs

    def share(self, points: Sequence[Point], asked: int | None) -> None:
        """Choose by the trials that come first how all of them share the machine."""
        self._share = share_machine(self._set, self.jobs(points), asked, ONE_A_CORE, self._say)

    def jobs(self, points: Sequence[Point]) -> list[Job]:
        variants = {
            self._label(number): (
                self._recipe,
                (*self._words, *(as_overrides(values) if number else ())),
            )
            for number, values in points
        }
        jobs = plan_jobs(variants, self._track, self._seeds)
        return [self._share.of(job) for job in jobs]

    def made(self, points: Sequence[Point]) -> bool:
        """Whether all of their runs are here."""
        jobs = self.jobs(points)
        return all(self._set.finished(job) or self._set.diverged(job) for job in jobs)

    def make(
        self, points: Sequence[Point], size: float | None, deadline: float | None
    ) -> list[Trial]:
        """The trials of these points; without those that did not come to their end in time."""
        found = self._set.run_until(self.jobs(points), self._say, deadline)
        trials = []
        for number, values in points:
            own = [entry for entry in found if entry and entry.recipe == self._label(number)]
            if len(own) == len(self._seeds):
                trials.append(_trial(number, values, size if number else None, own))
        return trials

    def _label(self, number: int) -> str:
        return f"{self._name} trial {number}"


def _trial(number: int, values: Values, size: float | None, entries: Sequence[Entry]) -> Trial:
    losses = [entry.val_loss for entry in entries]
    runs = [str(entry.run) for entry in entries]
    return Trial(number=number, values=dict(values), box=size, **_judged(losses, runs))


def _judged(losses: Sequence[float | None], runs: Sequence[str]) -> dict[str, Any]:
    """What the runs of a trial tell."""
    known = [loss for loss in losses if loss is not None]
    diverged = len(known) < len(losses)
    mean = None if diverged else math.fsum(known) / len(known)
    return {"losses": tuple(losses), "loss": mean, "diverged": diverged, "runs": tuple(runs)}


def _best(found: Tuning) -> int | None:
    first = found.ranked[0] if found.trials else None
    return None if first is None or first.diverged else first.number


def _later(found: Tuning, begin: float) -> Tuning:
    """With the clock of a budget of time gone on."""
    if found.seconds is None:
        return found
    return found.model_copy(update={"seconds": found.seconds + time.monotonic() - begin})


def _so_far(found: Tuning, runs: _Runs, out: Path) -> Tuning:
    """The same search by time, as far as it came before.

    By number of trials nothing is to be remembered: the same trials come again, and their runs are
    found.
    """
    if found.seconds is None:
        return found
    with suppress(SpeedrunError):  # there is none, or what is there is something else
        old = read_result(out / "tune.json")
        asked = {"recipe", "track", "over", "budget", "finalists", "seeds", "rows", "settings",
                 "jobs", "track_hash", "dataset_fingerprint"}  # fmt: skip
        if (
            isinstance(old, Tuning)
            and old.model_dump(include=asked) == found.model_dump(include=asked)
            and runs.made([(trial.number, trial.values) for trial in old.trials])
        ):
            n = len(found.seeds)  # a finalist has more, of which the search knew nothing
            first = [one.model_copy(update=_judged(one.losses[:n], one.runs[:n]))
                     for one in old.trials]  # fmt: skip
            found = found.model_copy(
                update={"trials": tuple(first), "seconds": old.seconds, "stopped": old.stopped}
            )
            return found.model_copy(update={"best": _best(found)})
    return found


def _write(found: Tuning, out: Path) -> None:
    if found.trials:
        found.write(out / "tune.json")


def _heading(points: Sequence[Point], size: float, found: Tuning) -> str:
    first, last = points[0][0], points[-1][0]
    which = f"trial {first}" if first == last else f"trials {first} to {last}"
    if size == 1:
        return f"{which}: the whole of each range"
    best = found.best_trial
    around = f"trial {best.number}" if best else "the recipe as it stands"
    return f"{which}: {size:.2g} of each range around {around}"


def rows_to_tune_on(config: Config) -> str:
    """Rows of validation apart from those that runs of this config are judged by."""
    dataset, length = Dataset.open(find_dataset(config)), config.batch.length
    judged, other = config.validation.rows, OTHER_ROWS[config.validation.rows]
    if judged == FIRST and dataset.manifest is None:
        # `train/evaluate.py` takes the last rows of public shards for the test they lack.
        raise ConfigError(
            f"{dataset.folder} holds public shards: the first rows are what runs are judged by and "
            "the last are the test, so none are left to tune on; --set validation.rows=spread, "
            "here and in the race, leaves those between"
        )
    available, count = rows_in(dataset.split(VAL), length), config.validation.tokens // length
    if available >= count:  # else the run itself says what is wrong
        chosen, others = (set(choose_rows(available, count, how)) for how in (judged, other))
        if not others or chosen & others:
            raise DataError(
                f"of the {available} sequences of validation in {dataset.folder} runs are judged "
                f"by {count}, which leaves too few to tune on; build the dataset with a larger "
                "--val-fraction, or lower validation.tokens or batch.length"
            )
    return other


def changed_nothing(found: Tuning) -> bool:
    """Whether several trials all ended in the very same losses: nothing reads what was searched."""
    losses = {trial.losses for trial in found.trials}
    return found.best is not None and len(found.trials) > 1 and len(losses) == 1


def write_recipe(found: Tuning, recipe: str, base: Config, path: Path) -> None:
    """The recipe with the values of the best trial, stated so that the track reads them so.

    Of a list of which an element was searched it states the whole, as `base` has it.
    """
    best, own = found.best_trial, found.as_it_stands
    values: Values = {}
    spent = f"{len(found.trials)} trials on {found.track}, {seeds_text(found)}, rows {found.rows}"
    if found.finalists:
        spent += f", the best {found.finalists} with {FURTHER_SEEDS} further seeds"
    if best is None:
        why = f"{found.recipe} as it stands: all of {spent} diverged."
    elif best.number == 0:
        why = f"{found.recipe} as it stands, which was the best of {spent}."
    else:
        values = best.values
        before = "" if own is None or own.loss is None else f", as it stood {own.loss:.4f}"
        why = (f"{found.recipe} with {' and '.join(values)} as in the best of {spent}: loss "
               f"{best.loss:.4f}{before}.")  # fmt: skip
    if found.settings:
        why += f" Set as well: {' '.join(found.settings)}."
    write_heir(path, recipe, why, values, base, found.track)


def write_heir(path: Path, recipe: str, why: str, values: Values, base: Config, track: str) -> None:
    """A recipe that extends another and states some values, so that the track reads them so."""
    stated = {key: recipe_value(key, value, track) for key, value in values.items()}
    table = {
        "extends": str(Path(recipe).expanduser().resolve()) if is_path(recipe) else recipe,
        "why": why,
        **nest(with_lists(stated, all_values(base))),
    }
    write_atomically(path, tomli_w.dumps(table).encode(), ConfigError)


def seeds_text(found: Tuning) -> str:
    first, last = found.seeds[0], found.seeds[-1]
    return f"seed {first}" if first == last else f"seeds {first} to {last}"
