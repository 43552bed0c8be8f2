"""The runs of a race, an ablation or a tuning: made once, resumed when killed, never repeated.

The folder of a run carries a hash of its experiment, the machine's settings (seconds are compared
too), the code and the dataset, so the same command finds what is finished and goes on with what was
cut off. Runs are child processes, interleaved by seed: what disturbs the machine disturbs all
recipes alike. How many go at a time is the machine's setting `jobs`, which `share.py` chooses.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from speedrun.config.experiment import (
    CODE_AND_DATA,
    LENGTH,
    SEED,
    STOP,
    all_values,
    differences,
    hash_of,
)
from speedrun.config.resolve import parse_override, resolve, toml_text
from speedrun.config.schema import Config
from speedrun.data.dataset import Dataset
from speedrun.data.find import find_dataset, fit_to_dataset
from speedrun.errors import ConfigError, RunError, quoted
from speedrun.science.children import Child, Children
from speedrun.science.compare import TIMES, Entry
from speedrun.train.environment import code_hash
from speedrun.train.run import RunFolder
from speedrun.train.summary import Environment, Summary

# Of runs that are judged by their last loss: all steps, and no validations to see a target crossed.
LAST_LOSS = ("train.stop=steps", "train.target:=0.0")
CHECKPOINT_EVERY = "30s"  # what a killed race loses at most
Say = Callable[[str], None]
TERMINATED = (128 + signal.SIGTERM, -signal.SIGTERM)  # asked to stop: able to save, not yet able


@dataclass(frozen=True)
class Job:
    """One run: a recipe with overrides on a track, and a seed. Its config is read beforehand."""

    label: str
    recipe: str
    track: str
    overrides: tuple[str, ...]
    seed: int
    config: Config

    def with_settings(self, *words: str) -> Job:
        """With settings of the machine that differ: the same run but for rounding and seconds."""
        overrides = (*self.overrides, *words)
        config = config_of(self.recipe, self.track, overrides, self.seed)
        return replace(self, overrides=overrides, config=config)


def config_of(recipe: str, track: str, words: Sequence[str], seed: int = 0) -> Config:
    """What a child process makes of these words: sizes that a text does not hold are smaller."""
    return fit_to_dataset(resolve(recipe, track, words, {"train.seed": seed})).config


def plain_of(track: str) -> Config:
    """A track by itself, without any recipe."""
    return fit_to_dataset(resolve(None, track)).config


def settings_of(config: Config, track: str) -> dict[str, Any]:
    """What a recipe makes of its track: the values that its config has and the track's has not."""
    plain = plain_of(track)
    return {key: value for key, _, value in differences(plain, config, but=(SEED, LENGTH, STOP))}


def track_hash(track: str) -> str:
    """Of all that a track sets, defaults of the schema left out: a new key leaves it as it is."""
    return hash_of({key: value for key, _, value in differences(Config(), plain_of(track))})


def plan_jobs(
    variants: Mapping[str, tuple[str, Sequence[str]]], track: str, seeds: Iterable[int]
) -> list[Job]:
    """A run of every variant (by label: recipe and overrides) with every seed, seed by seed."""
    return [
        Job(label, recipe, track, tuple(words), seed,
            config_of(recipe, track, words, seed))
        for seed in seeds
        for label, (recipe, words) in variants.items()
    ]  # fmt: skip


def refuse_own_keys(words: Sequence[str], keys: Sequence[str]) -> None:
    """Keys that the race, ablation or tuning sets itself."""
    for word in words:
        key, _ = parse_override(word)
        if key in keys or word.startswith(f"{key}:="):
            raise ConfigError(
                f"{quoted(word)} cannot be used here: the command sets {key} itself; leave it out"
            )


def this_command() -> str:
    return shlex.join(["speedrun", *sys.argv[1:]])


def common_dataset(jobs: Sequence[Job]) -> str:
    """Fingerprint of the dataset all jobs train on; losses on different ones do not compare."""
    first = jobs[0]
    found = {job.config.data: job for job in reversed(jobs)}
    prints = {
        data: Dataset.open(find_dataset(job.config)).fingerprint for data, job in found.items()
    }
    for data, job in found.items():
        if prints[data] != prints[first.config.data]:
            raise ConfigError(
                f"{first.label} and {job.label} are trained on different datasets, so their losses "
                "cannot be compared; give both the same data"
            )
    return prints[first.config.data]


class RunSet:
    """The runs of one race, ablation or tuning under `root`, all on one dataset and by one code."""

    def __init__(self, root: Path, dataset_fingerprint: str) -> None:
        self.root = root
        self._fingerprint, self._code = dataset_fingerprint, code_hash()
        self.begun = 0  # runs, by this command; others were there

    def folder(self, job: Job) -> RunFolder:
        key = hash_of([_identity(job.config), self._fingerprint, self._code])[:12]
        name = re.sub(r"[^A-Za-z0-9.=-]+", "_", job.label)[:60].strip("_")
        return RunFolder(self.root / "runs" / f"{name}-s{job.seed}-{key}")

    def finished(self, job: Job) -> Summary | None:
        summary = self.folder(job).readable_summary()
        return None if summary is None or summary.stopped_early else summary

    def diverged(self, job: Job) -> bool:
        """It gave up since its loss stayed not finite, as it would again."""
        return bool(self.folder(job).read_metrics("gave_up"))

    def _make_root(self) -> None:
        try:
            (self.root / "runs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"folder {self.root} cannot be written: {error.strerror}; name another with "
                "--out DIR"
            ) from None

    def run_all(self, jobs: Sequence[Job], say: Say) -> list[Entry]:
        """Make what is missing; entries come in the order of `jobs`, whichever run ends first."""
        return [entry for entry in self.run_until(jobs, say) if entry is not None]

    def run_until(
        self,
        jobs: Sequence[Job],
        say: Say,
        deadline: float | None = None,
    ) -> list[Entry | None]:
        """The same, with None for what was not made by the deadline, of `time.monotonic`.

        After a failure no run is begun, and those under way come to their end, to be found by the
        next attempt. A signal and the deadline end all of them, each with a checkpoint to go on
        from. A run that diverged and gave up has an entry without a loss, and is no failure.
        """
        self._make_root()
        at_once = max(job.config.machine.jobs for job in jobs)
        texts = [f"[{i}/{len(jobs)}] {job.label}, seed {job.seed}" for i, job in enumerate(jobs, 1)]
        found: dict[int, Summary | None] = {}  # None: it diverged
        failures: list[RunError] = []

        def collect(children: Children) -> None:
            number, child = children.wait(deadline)
            if children.asked or (children.late and child.poll() in TERMINATED):
                return
            try:
                found[number] = summary = self._result(jobs[number], child)
                say(f"{texts[number]}: {_result_text(summary, at_once)}")
            except RunError as error:
                failures.append(error)
                if under_way := len(children.running):
                    say(f"{texts[number]}: failed; of the others {under_way} under way")

        with Children() as children:
            for number, job in enumerate(jobs):
                summary = self.finished(job)
                if summary or self.diverged(job):
                    say(f"{texts[number]}: found {'finished' if summary else 'diverged'}")
                    found[number] = summary
                    continue
                while len(children.running) >= at_once:
                    collect(children)
                late = deadline is not None and time.monotonic() >= deadline
                if failures or children.asked or late:
                    break
                say(f"{texts[number]}: running")
                children.start(number, self._words(job))
                self.begun += 1
            while children.running:
                collect(children)
            if children.asked:
                say("stopped; the same command goes on from the checkpoints")
                sys.exit(128 + children.asked)
        if failures:
            raise failures[0]
        return [
            self._entry(job, found[number]) if number in found else None
            for number, job in enumerate(jobs)
        ]

    def _words(self, job: Job) -> list[str]:
        """The command line that makes a run or goes on with it."""
        run = self.folder(job)
        if run.config.exists():  # from its newest checkpoint or, without one, from the start
            words = ["train", f"data.dir={toml_text(job.config.data.dir)}", "--resume"]
        else:
            words = ["train", job.recipe, *job.overrides, "--track", job.track,
                     "--seed", str(job.seed)]  # fmt: skip
        return [*words, "--run", str(run.path), "--checkpoint-every", CHECKPOINT_EVERY,
                "--keep", "1", "--sample-tokens", "0"]  # fmt: skip

    def _result(self, job: Job, child: Child) -> Summary | None:
        summary, code = self.finished(job), child.poll()
        if not self.diverged(job) and (code != 0 or summary is None):
            raise RunError(
                f"the run of {job.label} with seed {job.seed} failed with exit code {code}: "
                f"{child.last_words()}; mend that and start again: what is finished is kept"
            )
        self._refuse_edited(job, self.folder(job))
        return summary

    def _refuse_edited(self, job: Job, run: RunFolder) -> None:
        """The child reads recipe and code anew; what it ran must be what its folder stands for."""
        ran, meant = _identity(run.load_config()), _identity(job.config)
        changed = [key for key in {**meant, **ran} if meant.get(key) != ran.get(key)]
        environment = Environment.read(run.environment)
        if environment is None or environment.code_sha256 != self._code:
            changed.append("the code")
        if changed:
            shutil.rmtree(run.path)  # it is not what its name says
            raise RunError(
                f"{', '.join(changed)} changed while the runs of {job.label} were made; start "
                "again: what is finished and unchanged is kept"
            )

    def _entry(self, job: Job, summary: Summary | None) -> Entry:
        """What the summary says under the same names, and which run it was; None: it diverged."""
        own: dict[str, Any] = {
            "recipe": job.label,
            "seed": job.seed,
            "run": str(self.folder(job).path.relative_to(self.root)),
        }
        if job.config.machine.jobs > 1:
            own |= dict.fromkeys(TIMES)
        return Entry.model_validate((summary.as_dict() if summary else {}) | own)


def _identity(config: Config) -> dict[str, Any]:
    """The experiment and the machine's settings. Of data and code fingerprints tell more."""
    return all_values(config, but=CODE_AND_DATA)


def _result_text(summary: Summary | None, at_once: int) -> str:
    if summary is None:
        return "diverged"
    loss = summary.val_loss
    text = "validation not finite" if loss is None else f"validation {loss:.4f}"
    text += f" after {summary.tokens:,} tokens"
    if summary.target:
        reached = "reached" if summary.reached_target else "not reached"
        text += f", target {summary.target} {reached}"
    beside = " beside others" if at_once > 1 else ""
    return f"{text}, {summary.train_seconds:.1f} s of training{beside}"
