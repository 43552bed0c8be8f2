"""The spread of a track's final losses between seeds: sigma of the rule, measured once and stated.

Some entries are run at the track's own length, each with seeds that nobody else has, so that no two
runs share their data or first weights. The spread is pooled over the entries, each around its own
mean. The track's file states it, `sigma = 0.0123`, and every row is judged by that number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from pydantic import BaseModel, FiniteFloat, PositiveInt

from speedrun.config.files import chain
from speedrun.data.dataset import Dataset
from speedrun.data.find import find_dataset
from speedrun.errors import ConfigError
from speedrun.files import write_json
from speedrun.science.jobs import LAST_LOSS, Job, RunSet, Say, plan_jobs, this_command
from speedrun.science.share import ONE_A_CORE, share_machine
from speedrun.train.environment import code_hash
from speedrun.train.summary import Environment, read_json, validated

FIRST_SEED = 2000  # a race counts its seeds from 0, a tuning from 1000
FEWEST = 3  # runs of an entry


class Sigma(NamedTuple):
    """Deviation of one final loss between seeds, and the degrees of freedom it was found with."""

    value: float
    df: int


def pooled(cells: Iterable[Iterable[float | None]]) -> Sigma | None:
    """Over groups of losses, each around a mean of its own; None: none has two that are finite."""
    squares, df = 0.0, 0
    for losses in cells:
        known = [loss for loss in losses if loss is not None]
        if len(known) > 1:
            centre = fmean(known)
            squares += math.fsum((loss - centre) ** 2 for loss in known)
            df += len(known) - 1
    return Sigma(math.sqrt(squares / df), df) if df else None


def stated_sigma(track: str) -> float:
    """What a track's own file says; a track that it extends has another text, size or target."""
    layer = chain("track", track)[-1]
    sigma = layer.notes.get("sigma")
    if sigma is None:
        raise ConfigError(
            f"{layer.origin} states no sigma, the spread of a final loss between seeds by which "
            f"rows are judged: measure it (speedrun ladder adamw muon --spread 24 --track {track}) "
            "and write it into its file"
        )
    if not 0 < sigma < 1:
        raise ConfigError(
            f"sigma = {sigma} ({layer.origin}) cannot be used: it is above 0, below 1"
        )
    return float(sigma)


class Spread(BaseModel, frozen=True):
    """What was run: final losses by entry and seed."""

    kind: str = "spread"
    track: str
    steps: PositiveInt
    losses: dict[str, dict[int, FiniteFloat]]
    dataset_fingerprint: str
    machine: dict[str, Any] = {}
    command: str = ""
    code_sha256: str = ""

    @property
    def sigma(self) -> Sigma | None:
        return pooled(by_seed.values() for by_seed in self.losses.values())

    def write(self, path: Path) -> None:
        found = self.sigma
        known = {"sigma": found.value, "degrees_of_freedom": found.df} if found else {}
        write_json(path, self.model_dump(mode="json") | known)


def read_spread(path: Path) -> Spread:
    return validated(Spread, read_json(path, ConfigError), path, "a measured spread", ConfigError)


def measure_spread(
    recipes: Mapping[str, str], track: str, runs: int, out: Path, jobs: int | None, say: Say
) -> Spread:
    """Run each of some entries (by name: its recipe) so many times, and write what came of it."""
    if runs < FEWEST:
        raise ConfigError(f"--spread {runs} cannot be used: {FEWEST} runs of each entry at least")
    planned: list[Job] = []
    for number, (name, recipe) in enumerate(recipes.items()):
        seeds = range(FIRST_SEED + number * runs, FIRST_SEED + (number + 1) * runs)
        planned += plan_jobs({name: (recipe, LAST_LOSS)}, track, seeds)
    config = planned[0].config
    fingerprint = Dataset.open(find_dataset(config)).fingerprint
    made = RunSet(out, fingerprint)
    share = share_machine(made, planned, jobs, ONE_A_CORE, say)
    shared = [share.of(job) for job in planned]
    losses: dict[str, dict[int, float]] = {}
    for job, entry in zip(shared, made.run_all(shared, say), strict=True):
        if entry.val_loss is None:
            raise ConfigError(
                f"{job.label} diverged with seed {job.seed}, so there is no spread of its losses: "
                "leave it out, or lower its rates"
            )
        losses.setdefault(job.label, {})[job.seed] = entry.val_loss
    environment = Environment.read(made.folder(shared[0]).environment)
    found = Spread(
        track=config.track,
        steps=config.steps,
        losses=losses,
        dataset_fingerprint=fingerprint,
        machine=environment.machine if environment else {},
        command=this_command(),
        code_sha256=code_hash(),
    )
    found.write(out / f"spread-{Path(track).stem}.json")
    return found
