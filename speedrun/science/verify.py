"""`speedrun verify`: does a set of runs reach the target, by the speedrun's own rule?

The rule: final losses of several runs, and a one-sided one-sample t-test with p below alpha that
their mean lies below the target (H0: it does not). With a known standard deviation of one run the
z-test of the speedrun's optimizer track takes its place, (target - mean) sqrt(n) >= z_alpha sigma,
and even one run can pass. Corner cases:

one run, no sigma    no spread, so no test: t and p are null, the claim does not hold
no variance          copies, or rounded too far: t and p are null, the claim does not hold
NaN or infinity      a diverged run counts: mean, t and p are null, the claim does not hold
nothing to test      misuse: no run, an empty file, a missing column, text for a number
several datasets     misuse: losses on different texts have no mean

Beside the validation loss, which the runs were chosen by, stands that of the test split.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from speedrun.config.experiment import SEED, differences
from speedrun.config.schema import Config
from speedrun.errors import ConfigError, RunError, SpeedrunError, quoted
from speedrun.science import stats
from speedrun.science.records import UNFIT, problems, read, unfit
from speedrun.train.evaluate import tested
from speedrun.train.run import RunFolder, given_once
from speedrun.train.summary import Summary

COLUMN = "val_loss"
SHOWN = 5  # keys, of runs that differ in many
# What is noted of a run's records, by the leaderboard's rule that it breaks.
SAID = {
    "whole records": "records are not whole",
    "not forced": "a run was resumed with --force",
    "adds up": "records do not add up",
    "same stop": "a run was given another length on the way",
    "test once": "the test was looked at before",
}


@dataclass(frozen=True)
class Verdict:
    """What the test found. `t` is z when sigma was given; `std` is the sample's in either case."""

    n: int
    mean: float | None
    std: float | None
    t: float | None
    p: float | None
    holds: bool
    test: str
    target: float
    alpha: float
    sigma: float | None
    notes: tuple[str, ...]
    test_mean: float | None = None  # loss of the same runs on the test split

    def as_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)


def verify(
    losses: Sequence[float],
    target: float,
    *,
    alpha: float = 0.01,
    sigma: float | None = None,
    notes: Sequence[str] = (),
) -> Verdict:
    """Test whether the mean of `losses` is below `target`; holds means p < alpha."""
    if not math.isfinite(target):
        raise ConfigError(f"--target {target} cannot be used: a finite loss is needed")
    if not 0 < alpha < 1:
        raise ConfigError(f"--alpha {alpha} cannot be used: it lies between 0 and 1")
    if sigma is not None and not (math.isfinite(sigma) and sigma > 0):
        raise ConfigError(f"--sigma {sigma} cannot be used: it is a standard deviation above 0")
    if not losses:
        raise ConfigError("verify has no losses to test; give run folders or --losses FILE")
    said = list(notes)
    n, test = len(losses), "t" if sigma is None else "z"
    mean = std = t = p = None
    if diverged := sum(not math.isfinite(loss) for loss in losses):
        said.append(f"{diverged} of {n} losses are not finite; a diverged run is not left out")
    else:
        mean, std = fmean(losses), stats.std(losses)
        if sigma is not None:
            t, p = stats.below_target_known_sigma(n, mean, sigma, target)
        else:
            t, p = stats.below_target(n, mean, std, target)
            if n == 1:
                said.append(
                    "one run has no spread to test with; add runs, or --sigma if it is known"
                )
            elif std == 0.0:
                said.append(
                    f"all {n} losses are equal, so they have no spread to test with; give "
                    "different runs, or more digits"
                )
    holds = p is not None and p < alpha
    return Verdict(n, mean, std, t, p, holds, test, target, alpha, sigma, tuple(said))


def read_losses(path: Path) -> list[float]:
    """One loss a line, or the column `val_loss` of a CSV file with a header."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"--losses {path} cannot be read: {reason}; name a file of losses, one a line"
        ) from None
    rows = [
        (number, [cell.strip() for cell in row])
        for number, row in enumerate(csv.reader(text.splitlines()), 1)
        if any(cell.strip() for cell in row)
    ]
    header = rows.pop(0)[1] if rows and not all(map(_is_number, rows[0][1])) else []
    if header and COLUMN not in header:
        raise ConfigError(
            f"--losses {path} has no column {COLUMN!r}, only {', '.join(header)}; name the "
            f"column {COLUMN} or give one loss a line"
        )
    if not rows:
        raise ConfigError(f"--losses {path} holds no losses; give one a line")
    if not header and len(rows[0][1]) > 1:
        raise ConfigError(
            f"--losses {path} has {len(rows[0][1])} columns and no header; name the column of "
            f"losses {COLUMN} or give one loss a line"
        )
    column = header.index(COLUMN) if header else 0
    losses = []
    for number, row in rows:
        cell = row[column] if column < len(row) else ""
        if not _is_number(cell):
            raise ConfigError(
                f"--losses {path}, line {number}: {quoted(cell)} is not a number: mend it or "
                "leave it out"
            )
        losses.append(float(cell))
    return losses


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.isascii()  # Python also reads the digits of other scripts


def read_runs(paths: Sequence[Path]) -> list[Summary]:
    """The results of runs, each given once."""
    given_once(paths)
    found: list[Summary] = []
    for path in paths:
        run = RunFolder(path)
        try:
            summary = run.read_summary()
        except RunError as error:  # exit code 1 says that the claim does not hold; this is misuse
            raise ConfigError(str(error)) from None
        if summary is None:
            what = "has not finished" if run.config.exists() else "is not a run folder"
            raise ConfigError(
                f"{path} {what}: it has no summary.json; `speedrun runs` lists "
                "runs and their states"
            )
        found.append(summary)
    return found


def gather(paths: Sequence[Path]) -> tuple[list[Summary], list[str]]:
    """Results of finished runs, and notes on what would make a test of them misleading."""
    runs = read_runs(paths)
    for path, run in zip(paths, runs, strict=True):
        if run.stopped_early:
            raise ConfigError(f"run {path} was stopped before its end; resume it, or leave it out")
    if len(datasets := {run.dataset_fingerprint[:12] for run in runs}) > 1:
        raise ConfigError(
            "the runs are validated on different datasets, so their mean means nothing: "
            f"{', '.join(sorted(datasets))}; give runs of one"
        )
    recipes = sorted({run.recipe for run in runs})
    notes = []
    if len(recipes) > 1:
        notes.append(f"the runs follow different recipes: {', '.join(recipes)}")
    if len({run.steps for run in runs}) > 1:
        notes.append("the runs stop at different steps; a stop chosen by a run's own loss "
                     "flatters the mean")  # fmt: skip
    configs = [run.load_config() for run in map(RunFolder, paths) if run.config.exists()]
    if changed := _changed(configs):
        notes.append(f"the runs differ in more than the seed: {changed}")
    if any(config.train.stop == "target" for config in configs):
        notes.append("runs that stop at the first loss at the target are below it by "
                     "construction; for a claim, let them go to the end")  # fmt: skip
    if len({(run.recipe, run.seed) for run in runs}) < len(runs):
        notes.append("some runs share a seed; equal runs are not independent")
    return runs, notes + _notes_on_records(paths)


def _changed(configs: Sequence[Config]) -> str:
    """The keys in which runs are different experiments but for the seed; some, if many."""
    pairs = ((configs[0], other) for other in configs[1:])
    keys = [*dict.fromkeys(one.key for pair in pairs for one in differences(*pair, but=(SEED,)))]
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return ", ".join(keys[:SHOWN]) + more


def _notes_on_records(paths: Sequence[Path]) -> list[str]:
    """What `submit` would refuse records for: a line for each reason, with the first run."""
    found: dict[str, list[str]] = {}
    for path in paths:
        try:
            for broken in problems(read(RunFolder(path))):
                found.setdefault(SAID[broken.rule], []).append(broken.found)
        except SpeedrunError as error:
            found.setdefault(SAID["whole records"], []).append(str(error))
    return [
        f"{what}: {every[0]}" + (f" (the first of {len(every)} runs)" if len(every) > 1 else "")
        for what, every in found.items()
    ]


class OnTest(NamedTuple):
    """The mean loss on the test split; without one, why."""

    mean: float | None = None
    none: bool = False  # the dataset has no test split
    failed: str = ""  # it could not be evaluated, because


def on_the_test(paths: Sequence[Path]) -> OnTest:
    """Each run is evaluated once, where its weights and its dataset are (`train/evaluate.py`)."""
    losses = []
    for path in paths:
        try:
            found = tested(RunFolder(path))
        except SpeedrunError as error:
            return OnTest(failed=str(error))
        except UNFIT as error:
            return OnTest(failed=unfit(RunFolder(path), error))
        if found is None:
            return OnTest(none=True)
        losses.append(found.loss)
    mean = fmean(losses)
    return OnTest(mean) if math.isfinite(mean) else OnTest(failed="a loss on it is not finite")


def common_target(runs: Sequence[Summary]) -> float:
    """The target the runs themselves were given, when they agree on one."""
    targets = {run.target for run in runs}
    if len(targets) == 1 and (target := targets.pop()):
        return target
    raise ConfigError("--target is needed: the runs do not state one target loss")
