"""A local leaderboard: sets of runs that kept a track's rules, and refused ones that did not.

The rules are the speedrun's: the mean final loss is at or below the target at p < alpha; all runs
stop at the same step, chosen before they ran; same recipe, data and code; every seed once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import BaseModel

from speedrun.config.experiment import SEED, differences, experiment, experiment_hash
from speedrun.config.files import chain
from speedrun.config.schema import Config
from speedrun.errors import ConfigError, RunError
from speedrun.files import write_json
from speedrun.science.verify import read_runs, verify
from speedrun.train.run import RunFolder
from speedrun.train.summary import Environment, read_json, validated

LEVEL = 0.01
# What a track decides and a run may not: the target, what is validated on, and the text.
TRACKS_OWN = ("train.target", "validation.tokens", "data.sources", "data.tokenizer",
              "data.val_fraction")  # fmt: skip
RULES = {
    "one track": "all runs are of one track, with its target",
    "the track's own": "a run leaves to the track what is validated, on what text, to what target",
    "same recipe": "all runs have the same config but for the seed and the machine's settings",
    "same data": "all runs are trained and validated on the same dataset",
    "same code": "all runs are made by the same code",
    "same stop": "all runs stop at the same step, chosen before they ran",
    "every seed once": "no two runs share a seed",
    "own machine": "a run has the machine to itself, for its seconds are compared",
    "significant": "the mean final loss is at or below the target at p < {alpha}",
}


class Submission(BaseModel, frozen=True):
    track: str
    recipe: str
    target: float
    n: int
    mean: float
    std: float | None
    p: float
    alpha: float
    steps: int
    tokens: int
    train_seconds: float
    wall_seconds: float
    params: int
    machine: str
    dataset_fingerprint: str
    code_sha256: str
    config_sha256: str  # of the experiment without the seed
    seeds: tuple[int, ...]
    date: str

    @property
    def identity(self) -> tuple[Any, ...]:
        """Entries that agree in it are the same runs, submitted again."""
        return (self.track, self.recipe, self.code_sha256, self.dataset_fingerprint,
                self.config_sha256, self.machine, self.seeds)  # fmt: skip


class Leaderboard(BaseModel):
    entries: tuple[Submission, ...]


def _refuse(rule: str, found: str, **values: Any) -> RunError:
    return RunError(f"refused by the rule '{RULES[rule].format(**values)}': {found}")


def check(paths: Sequence[Path], alpha: float) -> Submission:
    """The entry these runs make, or the first rule they break."""
    runs = read_runs(paths)
    if any(run.stopped_early for run in runs):
        raise _refuse("same stop", "one of the runs was stopped before its end")
    folders = [RunFolder(path) for path in paths]
    configs = [folder.load_config() for folder in folders]
    config, target = configs[0], configs[0].train.target
    if len({other.track for other in configs}) > 1 or not target:
        raise _refuse("one track", ", ".join(sorted({other.track for other in configs})))
    for path, other in zip(paths, configs, strict=True):
        for key, value, changed in differences(config, other, but=(SEED,)):
            raise _refuse("same recipe", f"{key} is {changed!r} in {path}, not {value!r}")
        if other.machine.jobs > 1:
            raise _refuse("own machine", f"{path} was one of {other.machine.jobs} at a time")
    _check_track(config)
    if alpha > LEVEL:
        raise _refuse("significant", f"--alpha {alpha} is weaker", alpha=LEVEL)
    if config.train.stop != "steps":
        raise _refuse("same stop", "train.stop = 'target' lets each run choose its own end")
    places = []
    for folder in folders:
        place = Environment.read(folder.environment)
        if place is None:
            raise _refuse("same code", f"{folder.path} has no environment.json")
        places.append(place)
    codes = [place.code_sha256 or "unknown" for place in places]
    for rule, values in (
        ("same data", {run.dataset_fingerprint[:12] for run in runs}),
        ("same code", {code[:12] for code in codes}),
        ("same stop", {run.steps for run in runs}),
    ):
        if len(values) > 1 or "unknown" in values:
            raise _refuse(rule, f"found {', '.join(map(str, sorted(values)))}")
    seeds = [run.seed for run in runs]
    if len(set(seeds)) < len(seeds):
        raise _refuse("every seed once", f"seeds {', '.join(map(str, seeds))}")
    verdict = verify([run.loss for run in runs], target, alpha=alpha)
    if not verdict.holds:
        p = "undefined" if verdict.p is None else f"{verdict.p:.3g}"
        raise _refuse("significant", f"n = {verdict.n}, mean {verdict.mean}, p {p}", alpha=alpha)
    own = {
        "train_seconds": fmean(run.train_seconds for run in runs),
        "wall_seconds": fmean(run.wall_seconds for run in runs),
        "machine": f"{places[0].gpu or places[0].cpu}, {places[0].cores} cores",
        "code_sha256": codes[0],
        "config_sha256": experiment_hash(config, but=(SEED,)),
        "seeds": sorted(seeds),
        "date": time.strftime("%Y-%m-%d"),
    }
    # The rest is the first run's, which it shares with the others, and the verdict's, by name.
    return Submission.model_validate(runs[0].as_dict() | vars(verdict) | own)


def _check_track(config: Config) -> None:
    """A built-in track is held to its file; of a user's own track only its name is known here."""
    try:
        layers = chain("track", config.track)
    except ConfigError:
        return
    found = experiment(config)
    own = {key: value for layer in layers for key, value in layer.values.items()}
    for key, value in own.items():
        if key in TRACKS_OWN and found[key] != value:
            raise _refuse("the track's own", f"{key} is {found[key]!r}, not {value!r}")


def read(file: Path) -> tuple[Submission, ...]:
    if not file.exists():
        return ()
    found = read_json(file, ConfigError)
    return validated(Leaderboard, found, file, "a leaderboard", ConfigError).entries


def submit(paths: Sequence[Path], file: Path, alpha: float) -> Submission:
    """Check the runs and add their entry; the same entry is not added twice."""
    entry = check(paths, alpha)
    kept = [other for other in read(file) if other.identity != entry.identity]
    entries = sorted([*kept, entry], key=lambda one: (one.track, one.train_seconds))
    write_json(file, Leaderboard(entries=tuple(entries)).model_dump(mode="json"))
    return entry
