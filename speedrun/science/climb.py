"""The rows of the optimizer track on one text, as they are made: which lengths are run, and why.

Two seeds look for the target on the grid of lengths. From there all seeds are run, length by
length, until one passes the rule while its shorter neighbour does not (`rule.py`), and each seed is
followed until two neighbours lie around its own crossing. All seeds of a row are run at the same
lengths as far as the rule is concerned: what a run looks like decides nothing about it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

from speedrun.config.experiment import LENGTH, SEED, STOP, differences
from speedrun.config.files import chain
from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.data.dataset import Dataset
from speedrun.data.find import find_dataset, fit_to_dataset
from speedrun.errors import ConfigError
from speedrun.science.finish import SHORTEST, Search, run_places, run_searches
from speedrun.science.jobs import LAST_LOSS, Job, RunSet, config_of, plan_jobs, this_command
from speedrun.science.rule import Sigma, next_place, pooled
from speedrun.science.rungs import (
    LONGEST,
    Ladder,
    Rung,
    Timed,
    Tuned,
    Verdicts,
    cells_of,
    file_of,
    lengths_of,
    read_ladder,
)
from speedrun.science.share import ONE_A_CORE, Share, share_machine
from speedrun.train import checkpoint
from speedrun.train.environment import code_hash
from speedrun.train.summary import Environment

SCOUTS = 2  # seeds that find the place where the others are run
ASKED = ("track", "target", "own_steps", "grid", "seeds", "dataset_fingerprint")
Say = Callable[[str], None]
Searches = dict[tuple[str, int], Search]


def packages_of(config: Config) -> list[str]:
    """Top-level packages that the code of a config is from."""
    named = (used.named for used in config.used_code().values())
    return sorted({one.package for one in named if not one.is_file})


def other_budget(table: Ladder, budget: str | None, entries: Collection[str]) -> str | None:
    """What other rows of a table were tuned with, if not with this budget (None: not at all)."""
    found = (
        rung.tuned.budget if rung.tuned else None
        for rung in table.rungs
        if rung.recipe not in entries
    )
    return next((its or "no trials" for its in found if its != budget), None)


class Table:
    """The rows of one track: its file, and the runs that make it."""

    def __init__(
        self, track: str, seeds: Sequence[int], out: Path, jobs: int | None, say: Say
    ) -> None:
        self._track, self._say, self._jobs = track, say, jobs
        self._path = file_of(track, out)
        self._plain = fit_to_dataset(resolve(None, track)).config
        fingerprint = Dataset.open(find_dataset(self._plain)).fingerprint
        self._runs = RunSet(out, fingerprint)
        self._share: Share | None = None
        asked = Ladder(
            track=self._plain.track,
            target=self._plain.train.target,
            own_steps=self._plain.steps,
            seeds=tuple(seeds),
            dataset_fingerprint=fingerprint,
        )
        self.found = self._begun(asked)

    def _begun(self, asked: Ladder) -> Ladder:
        """The table that is there, if rows can be added to it."""
        if not self._path.exists():
            return asked
        there = read_ladder(self._path)
        for key in ASKED:
            if (old := getattr(there, key)) != (new := getattr(asked, key)):
                raise ConfigError(
                    f"{self._path} is a table with {key} = {old}, and this would be one with "
                    f"{new}; name another folder with --out"
                )
        return there

    def refuse_other_budget(self, budget: str | None, entries: Collection[str]) -> None:
        """All rows of a table are tuned alike; those of `entries` are made anew."""
        if (other := other_budget(self.found, budget, entries)) is not None:
            raise ConfigError(
                f"{self._path} has rows tuned with {other}, and this would be one with "
                f"{budget or 'no trials'}: tune all alike, or name another folder with --out"
            )

    def add(self, name: str, recipe: str, file: str, tuned: Tuned | None, guess: int) -> int:
        """Make the row of an entry; returns the place where it ended, a guess for other tracks.

        `recipe` is the entry, `file` the recipe with the values that were found for it.
        """
        self._say(f"{name} on {self._track}: shortest runs that end below {self.found.target}")
        config = config_of(file, self._track, ())
        rung = Rung(
            recipe=name,
            why=chain("recipe", recipe)[-1].notes.get("why", ""),
            optimizer=config.optimizer.hidden.use or config.optimizer.kind,
            packages={package: _version(package) for package in packages_of(config)},
            settings=self._settings(config),
            tuned=tuned,
            code_sha256=code_hash(),
            losses={},
        )
        old = self.found.rung(name)
        if old and (old.settings, old.code_sha256) == (rung.settings, rung.code_sha256):
            rung = rung.model_copy(update={"losses": old.losses, "timed": old.timed})
        searches = {}
        for seed in self.found.seeds:
            searches[name, seed] = self.found.search(seed, rung.losses)
            searches[name, seed].guess = guess
        self._climb(name, file, searches)
        self._write(rung, file, searches)
        steps = Verdicts(self.found).results[name].steps
        ends = [place for search in searches.values() for place in search.runs
                if search.steps(place) == steps]  # fmt: skip
        return ends[0] if ends else guess

    def settle(self, name: str, file: str) -> None:
        """Run what the spread between seeds, now of more rows, asks for of a row that is there."""
        rung = self.found.rung(name)
        if rung is None:
            return
        searches = {(name, seed): self.found.search(seed, rung.losses) for seed in self.found.seeds}
        self._climb(name, file, searches)
        self._write(rung, file, searches)

    def measure(self, files: dict[str, str], rounds: int) -> None:
        """Seconds and memory of rows that have a result, one run at a time, taking turns."""
        variants = {}
        for name, result in Verdicts(self.found).results.items():
            if name in files and result.steps:
                variants[name] = files[name], (*LAST_LOSS, f"train.steps={result.steps}")
        if not variants:
            raise ConfigError(
                f"{self._path} has no row of these with a result: make them without --clock first"
            )
        first = self.found.seeds[0]
        jobs = plan_jobs(variants, self._track, range(first, first + rounds))
        self._runs.run_all(jobs, self._say)
        for name in variants:
            timed = []
            for job in jobs:
                summary = self._runs.finished(job) if job.label == name else None
                if summary:
                    timed.append(Timed(seed=job.seed, steps=summary.steps,
                                       seconds=summary.train_seconds,
                                       peak_memory_bytes=summary.peak_memory_bytes))  # fmt: skip
            rung = self.found.rung(name)
            assert rung is not None
            self.found = self.found.with_rung(rung.model_copy(update={"timed": tuple(timed)}))
        self.found.write(self._path)

    def _climb(self, name: str, file: str, searches: Searches) -> None:
        variants = {name: (file, LAST_LOSS)}
        if self._share is None:
            jobs = plan_jobs(variants, self._track, self.found.seeds)
            self._share = share_machine(self._runs, jobs, self._jobs, ONE_A_CORE, self._say)
        how = (self._runs, self._share, variants, self._track)
        scouts = dict([*searches.items()][:SCOUTS])
        run_searches(*how, scouts, self._say)
        ends = [search.done[1] for search in scouts.values() if search.done]
        if not ends:
            first = next(iter(scouts.values()))
            self._say(f"{name} has no figure on {self._track}: it {first.why_not}")
            return
        while (place := self._wanted(name, searches, max(ends))) is not None:
            missing = [(key, place) for key, one in searches.items() if place not in one.runs]
            run_places(*how, searches, missing, self._say)
        run_searches(*how, searches, self._say)

    def _wanted(self, name: str, searches: Searches, start: int) -> int | None:
        """The place where all seeds are needed next; None: the rule is decided, or cannot be."""
        cells = cells_of([*searches.values()])
        place = next_place(cells, self.found.target, self._sigma(name, searches), start)
        if place is None:
            return None
        steps = next(iter(searches.values())).steps(place)
        return place if SHORTEST <= steps <= LONGEST * self.found.own_steps else None

    def _sigma(self, name: str, searches: Searches) -> Sigma | None:
        """Of the rows that are there and this one as far as it is."""
        others = [rows for other, rows in Verdicts(self.found).searches.items() if other != name]
        tables = [*others, [*searches.values()]]
        return pooled(losses for rows in tables for losses in lengths_of(rows).values())

    def _write(self, rung: Rung, file: str, searches: Searches) -> None:
        losses: dict[int, dict[int, float | None]] = {}
        for (_, seed), search in searches.items():
            for place, entry in search.runs.items():
                losses.setdefault(search.steps(place), {})[seed] = entry.val_loss
        ordered = {steps: dict(sorted(losses[steps].items())) for steps in sorted(losses)}
        one = self._job(rung.recipe, file, ordered)
        environment = Environment.read(self._runs.folder(one).environment) if one else None
        new = rung.model_copy(
            update={
                "losses": ordered,
                "state_bytes": self._state_bytes(one) if one else rung.state_bytes,
            }
        )
        self.found = self.found.with_rung(new)
        if environment:
            self.found = self.found.model_copy(update={"machine": environment.machine})
        commands = dict.fromkeys((*self.found.commands, this_command()))
        self.found = self.found.model_copy(update={"commands": tuple(commands)})
        self.found.write(self._path)

    def _job(self, name: str, file: str, losses: dict[int, dict[int, float | None]]) -> Job | None:
        """One of a row's runs."""
        for steps, by_seed in losses.items():
            words = (*LAST_LOSS, f"train.steps={steps}")
            for job in plan_jobs({name: (file, words)}, self._track, by_seed):
                shared = (self._share or Share()).of(job)
                if self._runs.finished(shared):
                    return shared
        return None

    def _state_bytes(self, job: Job) -> int | None:
        """Of all optimizers of a run, as its last checkpoint holds them."""
        last, _ = checkpoint.latest(self._runs.folder(job).checkpoints)
        return sum(tensor.nbytes for tensor in last.optimizer().values()) if last else None

    def _settings(self, config: Config) -> dict[str, Any]:
        """What an entry is: the values that its config has and the track by itself has not."""
        found = differences(self._plain, config, but=(SEED, LENGTH, STOP))
        return {key: value for key, _, value in found}


def _version(package: str) -> str:
    """Of what brings a package, by the name it is installed by."""
    for distribution in packages_distributions().get(package, [package]):
        with suppress(PackageNotFoundError):
            return f"{distribution} {version(distribution)}"
    return package
