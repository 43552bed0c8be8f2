"""Sets of runs that a race or an ablation needs: done once, resumed when killed, never repeated.

A run is known by a hash of its config, the code and the dataset. Its folder carries that hash, so
the same command finds finished runs and goes on with the one that was cut off. Runs are child
processes, one after the other and interleaved by seed: noise of the machine hits all alike.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedrun.config.resolve import difference, parse_override, resolve
from speedrun.config.schema import Config
from speedrun.data.shards import Dataset
from speedrun.errors import ConfigError, RunError
from speedrun.train.environment import code_hash
from speedrun.train.run import RunFolder

CHECKPOINT_EVERY = "30s"  # what a killed race loses at most


@dataclass(frozen=True)
class Job:
    """One run: a recipe with overrides, and a seed; read when the race begins."""

    label: str
    recipe: str
    overrides: tuple[str, ...]
    seed: int
    config: Config


def plan_jobs(
    variants: Mapping[str, tuple[str, Sequence[str]]], track: str, seeds: int
) -> list[Job]:
    """A run of every variant (by label: recipe and overrides) with every seed, seed by seed."""
    return [
        Job(label, recipe, tuple(words), seed,
            resolve(recipe, track, words, {"train.seed": seed}).config)
        for seed in range(seeds)
        for label, (recipe, words) in variants.items()
    ]  # fmt: skip


def refuse_own_keys(words: Sequence[str], keys: Sequence[str]) -> None:
    """Keys that the race or ablation sets itself."""
    for word in words:
        key, _ = parse_override(word)
        if key in keys:
            raise ConfigError(f"{word!r} cannot be used here: {key} is set by the command itself")


def common_dataset(jobs: Sequence[Job]) -> Dataset:
    """The dataset all of the jobs train on; losses on different ones cannot be compared."""
    from speedrun.train.setup import find_dataset

    first, found = jobs[0], Dataset.open(find_dataset(jobs[0].config))
    for job in jobs[1:]:
        if job.config.data == first.config.data:
            continue
        other = Dataset.open(find_dataset(job.config))
        if other.fingerprint != found.fingerprint:
            raise ConfigError(
                f"{first.label} and {job.label} are trained on different datasets, so their losses "
                "cannot be compared; give both the same data"
            )
    return found


@dataclass(frozen=True)
class Done:
    job: Job
    folder: Path
    summary: dict[str, Any]


class Workshop:
    """Where the runs of one race or ablation live."""

    def __init__(self, root: Path, track: str, dataset_fingerprint: str) -> None:
        self.root, self.track = root, track
        self._fingerprint, self._code = dataset_fingerprint, code_hash()

    def folder(self, job: Job) -> Path:
        facts = job.config.model_dump_json() + self._fingerprint + self._code
        key = hashlib.sha256(facts.encode()).hexdigest()[:12]
        name = re.sub(r"[^A-Za-z0-9.=-]+", "_", job.label)[:60].strip("_")
        return self.root / "runs" / f"{name}-s{job.seed}-{key}"

    def finished(self, job: Job) -> Done | None:
        try:
            summary = json.loads((self.folder(job) / "summary.json").read_text())
        except (OSError, ValueError):
            return None
        return None if summary["stopped_early"] else Done(job, self.folder(job), summary)

    def run(self, job: Job) -> Done:
        """The finished run, done now or found done."""
        found = self.finished(job)
        if found is not None:
            return found
        folder = self.folder(job)
        words = ["train"]
        if RunFolder(folder).config.exists():
            words += ["--resume"]  # from its newest checkpoint or, without one, from the start
        else:
            words += [job.recipe, *job.overrides, "--track", self.track, "--seed", str(job.seed)]
        words += ["--run", str(folder), "--checkpoint-every", CHECKPOINT_EVERY, "--keep", "1",
                  "--sample-tokens", "0"]  # fmt: skip
        child = speedrun_in_child(words)
        done = self.finished(job)
        if child.returncode != 0 or done is None:
            said = (child.stderr.strip() or child.stdout.strip()).splitlines()
            raise RunError(
                f"the run of {job.label} with seed {job.seed} failed with exit code "
                f"{child.returncode}: {said[-1] if said else 'it said nothing'}"
            )
        self._refuse_edited(job, RunFolder(folder))
        return done

    def _refuse_edited(self, job: Job, run: RunFolder) -> None:
        """The child reads recipe and code anew; what it ran must be what its folder stands for."""
        changed = [key for key, *_ in difference(job.config, run.load_config())]
        if json.loads(run.environment.read_text())["code_sha256"] != self._code:
            changed.append("the code")
        if changed:
            shutil.rmtree(run.path)  # it is not what its name says
            raise RunError(
                f"{', '.join(changed)} changed while the runs of {job.label} were made; start "
                "again: what is finished and unchanged is kept"
            )

    def run_all(self, jobs: Sequence[Job], say: Callable[[str], None]) -> list[Done]:
        results = []
        for number, job in enumerate(jobs, 1):
            known = self.finished(job) is not None
            where = f"[{number}/{len(jobs)}] {job.label}, seed {job.seed}"
            say(f"{where}: {'found finished' if known else 'running'}")
            done = self.run(job)
            results.append(done)
            if not known:
                say(f"{where}: {describe(done.summary)}")
        return results


def speedrun_in_child(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "speedrun", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def describe(summary: dict[str, Any]) -> str:
    loss = summary["val_loss"]
    text = "validation not finite" if loss is None else f"validation {loss:.4f}"
    text += f" after {summary['tokens']:,} tokens"
    if summary["target"]:
        reached = summary["reached_target"]
        text += f", target {summary['target']} {'reached' if reached else 'not reached'}"
    return f"{text}, {summary['train_seconds']:.1f} s of training"
