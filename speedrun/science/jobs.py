"""Sets of runs that a race or an ablation needs: done once, resumed when killed, never repeated.

A run is known by a hash of its config, the code and the dataset. Its folder carries that hash, so
the same command finds finished runs and goes on with the one that was cut off. Runs are child
processes, one after the other and interleaved by seed: noise of the machine hits all alike.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.errors import RunError
from speedrun.train.environment import code_hash

CHECKPOINT_EVERY = "30s"  # what a killed race loses at most


@dataclass(frozen=True)
class Job:
    """One run: a recipe with overrides, and a seed."""

    label: str
    recipe: str
    overrides: tuple[str, ...]
    seed: int

    def config(self, track: str) -> Config:
        return resolve(self.recipe, track, self.overrides, {"train.seed": self.seed}).config


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
        facts = job.config(self.track).model_dump_json() + self._fingerprint + self._code
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
        if any((folder / "checkpoints").glob("step-*")):
            words += ["--resume"]
        else:
            for left in ("config.toml", "metrics.jsonl"):
                (folder / left).unlink(missing_ok=True)
            words += [job.recipe, *job.overrides, "--track", self.track, "--seed", str(job.seed)]
        words += ["--run", str(folder), "--checkpoint-every", CHECKPOINT_EVERY, "--keep", "1",
                  "--sample-tokens", "0"]  # fmt: skip
        child = subprocess.run([sys.executable, "-m", "speedrun", *words], capture_output=True,
                               text=True)  # fmt: skip
        done = self.finished(job)
        if child.returncode != 0 or done is None:
            said = (child.stderr.strip() or child.stdout.strip()).splitlines()
            raise RunError(
                f"the run of {job.label} with seed {job.seed} failed with exit code "
                f"{child.returncode}: {said[-1] if said else 'it said nothing'}"
            )
        return done

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


def describe(summary: dict[str, Any]) -> str:
    text = f"validation {summary['val_loss']:.4f} after {summary['tokens']:,} tokens"
    if summary["target"]:
        reached = summary["reached_target"]
        text += f", target {summary['target']} {'reached' if reached else 'not reached'}"
    return f"{text}, {summary['train_seconds']:.1f} s of training"
