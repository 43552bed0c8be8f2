"""The rows of the optimizer track on one text, as they are made: which lengths are run, and why.

Two seeds look for the target on the grid of lengths. From there all seeds are run, length by
length, until one passes the rule while its shorter neighbour does not, and at some lengths around
it, from which each seed's crossing is computed (`rule.py`). All seeds of a row are run at the same
lengths: what a run looks like decides nothing about it. No row asks another for anything.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from speedrun.config.code import package_version
from speedrun.config.files import chain
from speedrun.config.schema import Config
from speedrun.data.dataset import Dataset
from speedrun.data.find import find_dataset
from speedrun.errors import ConfigError
from speedrun.science.finish import SHORTEST, Search, run_places, run_searches
from speedrun.science.jobs import (
    LAST_LOSS,
    Job,
    RunSet,
    Say,
    config_of,
    plain_of,
    plan_jobs,
    settings_of,
    this_command,
    track_hash,
)
from speedrun.science.rule import around, least, next_place
from speedrun.science.rungs import (
    LONGEST,
    Ladder,
    Rung,
    Timed,
    Tuned,
    Verdicts,
    cells_of,
    file_of,
    read_ladder,
)
from speedrun.science.share import ONE_A_CORE, Share, share_machine
from speedrun.science.spread import stated_sigma
from speedrun.train import checkpoint
from speedrun.train.environment import code_hash
from speedrun.train.summary import Environment

SCOUTS = 2  # seeds that find the place where the others are run
# What all rows of a table share; the hash, which says least, comes last.
ASKED = ("track", "target", "sigma", "own_steps", "grid", "seeds", "dataset_fingerprint",
         "track_hash")  # fmt: skip
Searches = dict[tuple[str, int], Search]


def packages_of(config: Config) -> list[str]:
    """Top-level packages that the code of a config is from."""
    named = (used.named for used in config.used_code().values())
    return sorted({one.package for one in named if not one.is_file})


How = tuple[str, str] | None  # the budget of a tuning and its track; None: not tuned


def how_text(how: How) -> str:
    return "not tuned" if how is None else f"tuned in {how[0]} on {how[1]}"


def other_tuning(table: Ladder, how: How, entries: Collection[str]) -> str:
    """How other rows of a table were tuned, if not like this; empty: all of them were."""
    found = (
        (rung.tuned.budget, rung.tuned.track) if rung.tuned else None
        for rung in table.rungs
        if rung.recipe not in entries
    )
    return next((how_text(its) for its in found if its != how), "")


class Table:
    """The rows of one track: its file, and the runs that make it."""

    def __init__(
        self, track: str, seeds: Sequence[int], out: Path, jobs: int | None, say: Say
    ) -> None:
        self._track, self._say, self._jobs = track, say, jobs
        self._path = file_of(track, out)
        plain = plain_of(track)
        fingerprint = Dataset.open(find_dataset(plain)).fingerprint
        self._runs = RunSet(out, fingerprint)
        self._share: Share | None = None
        asked = Ladder(
            track=plain.track,
            target=plain.train.target,
            track_hash=track_hash(track),
            sigma=stated_sigma(track),
            own_steps=plain.steps,
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

    def refuse_other_tuning(self, how: How, entries: Collection[str]) -> None:
        """All rows of a table are tuned alike; those of `entries` are made anew."""
        if other := other_tuning(self.found, how, entries):
            raise ConfigError(
                f"{self._path} has rows that were {other}, and this one would be "
                f"{how_text(how)}: tune all alike, or name another folder with --out"
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
            packages={package: package_version(package) for package in packages_of(config)},
            settings=settings_of(config, self._track),
            tuned=tuned,
            code_sha256=code_hash(),
            losses={},
        )
        old = self.found.rung(name)
        if old and (old.settings, old.code_sha256) == (rung.settings, rung.code_sha256):
            kept = ("losses", "timed", "state_bytes", "machine")
            rung = rung.model_copy(update={key: getattr(old, key) for key in kept})
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

    def measure(self, files: dict[str, str], rounds: int) -> None:
        """Seconds and memory of rows that have a result, one run at a time, taking turns."""
        variants = {}
        for name, result in Verdicts(self.found).results.items():
            if name not in files or not result.steps:
                continue
            rung = self.found.rung(name)
            settings = settings_of(config_of(files[name], self._track, ()), self._track)
            if rung is None or rung.settings != settings:
                raise ConfigError(
                    f"{name} has other values now than its row in {self._path}: make the row again "
                    "without --clock first"
                )
            variants[name] = files[name], (*LAST_LOSS, f"train.steps={result.steps}")
        if not variants:
            raise ConfigError(
                f"{self._path} has no row of these with a result: make them without --clock first"
            )
        first = self.found.seeds[0]
        jobs = plan_jobs(variants, self._track, range(first, first + rounds))
        self._runs.run_all(jobs, self._say)
        self._keep_seconds(jobs)
        self.found.write(self._path)

    def _keep_seconds(self, jobs: Sequence[Job]) -> None:
        """Of runs on one machine, that of the last: others' seconds cannot be held against them."""
        made = [(job, self._machine(job), self._runs.finished(job)) for job in jobs]
        clock = made[-1][1]
        timed: dict[str, tuple[Timed, ...]] = {}
        for job, machine, summary in made:
            runs = timed.setdefault(job.label, ())
            if summary and machine == clock:
                run = Timed(seed=job.seed, steps=summary.steps, seconds=summary.train_seconds,
                            peak_memory_bytes=summary.peak_memory_bytes)  # fmt: skip
                timed[job.label] = (*runs, run)
        old = {rung.recipe: rung.timed if self.found.clock == clock else ()
               for rung in self.found.rungs}  # fmt: skip
        lost = [
            *(rung.recipe for rung in self.found.rungs if rung.timed and not old[rung.recipe]),
            *(name for name, runs in timed.items() if not runs),
        ]
        if lost := [name for name in dict.fromkeys(lost) if not timed.get(name)]:
            self._say(f"no seconds of {', '.join(lost)}: they were measured on another machine")
        rungs = [rung.model_copy(update={"timed": timed.get(rung.recipe, old[rung.recipe])})
                 for rung in self.found.rungs]  # fmt: skip
        self.found = self.found.model_copy(update={"rungs": tuple(rungs), "clock": clock})

    def _machine(self, job: Job) -> dict[str, Any]:
        """That a run was made on; a run that moved between machines is on none."""
        environment = Environment.read(self._runs.folder(job).environment)
        return {} if environment is None or environment.earlier else environment.machine

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
        while missing := self._missing(searches, max(ends)):
            run_places(*how, searches, missing, self._say)

    def _missing(self, searches: Searches, start: int) -> list[tuple[tuple[str, int], int]]:
        """The runs that come next: of one place until the rule has its result, then around it."""
        cells = cells_of([*searches.values()])
        target, sigma = self.found.target, self.found.sigma
        place = next_place(cells, target, sigma, start)
        if place is None:
            result = least(cells, target, sigma)
            assert result is not None
            places = around(result, cells, target)
        else:
            places = [place]
        asked: dict[tuple[object, int], tuple[tuple[str, int], int]] = {}
        for one in places:
            for key, search in searches.items():
                steps = search.steps(one)
                if one not in search.runs and SHORTEST <= steps <= LONGEST * self.found.own_steps:
                    asked.setdefault((key, steps), (key, one))  # short lengths fall together
        return [*asked.values()]

    def _write(self, rung: Rung, file: str, searches: Searches) -> None:
        losses: dict[int, dict[int, float | None]] = {}
        for (_, seed), search in searches.items():
            for place, entry in search.runs.items():
                losses.setdefault(search.steps(place), {})[seed] = entry.val_loss
        ordered = {steps: dict(sorted(losses[steps].items())) for steps in sorted(losses)}
        one = self._job(rung.recipe, file, ordered)
        new = rung.model_copy(
            update={
                "losses": ordered,
                "state_bytes": self._state_bytes(one) if one else rung.state_bytes,
                "machine": self._machine(one) if one else rung.machine,
            }
        )
        self.found = self.found.with_rung(new)
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
        """Of all optimizers of a run, by its last checkpoint.

        There one with modes has the weights of training as well, which in a run are the model's.
        """
        last, _ = checkpoint.latest(self._runs.folder(job).checkpoints)
        state = last.optimizer() if last else {}
        return sum(one.nbytes for name, one in state.items() if "]:weights/" not in name) or None
