"""`speedrun verify`: does a set of runs reach the target, by the speedrun's own rule?

The rule: final losses of several runs, and a one-sided one-sample t-test with p below alpha that
their mean lies below the target (H0: it does not). With a known standard deviation of one run the
optimizer track's z-rule takes its place, (target - mean) sqrt(n) >= z_alpha sigma, and even one run
can pass. Defined corners:

one run, no sigma    no spread, so no test: t and p are null, the claim does not hold
no variance          p is 0 below the target, 1 above, 0.5 on it; t is null, being infinite
NaN or infinity      a diverged run counts: mean, t and p are null, the claim does not hold
nothing to test      misuse: no run, an empty file, a missing column, text for a number
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from speedrun.errors import ConfigError
from speedrun.science import stats
from speedrun.train.run import RunFolder

COLUMN = "val_loss"


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
    _check_options(target, alpha, sigma)
    if not losses:
        raise ConfigError("verify has no losses to test; give run folders or --losses FILE")
    said = list(notes)
    n, test = len(losses), "t" if sigma is None else "z"
    diverged = sum(not math.isfinite(loss) for loss in losses)
    if diverged:
        said.append(f"{diverged} of {n} losses are not finite; a diverged run is not left out")
        return Verdict(
            n, None, None, None, None, False, test, target, alpha, sigma, tuple(said)
        )  # fmt: skip
    centre, spread = stats.mean(losses), stats.std(losses)
    if sigma is None:
        found = stats.below_target(n, centre, spread, target)
        if n == 1:
            said.append("one run has no spread to test with; add runs, or --sigma if it is known")
        elif spread == 0.0:
            said.append(f"all {n} losses are equal; are they different runs?")
    else:
        found = stats.below_target_known_sigma(n, centre, sigma, target)
    holds = found.p is not None and found.p < alpha
    return Verdict(
        n, centre, spread, found.statistic, found.p, holds, test, target, alpha, sigma, tuple(said)
    )


def _check_options(target: float, alpha: float, sigma: float | None) -> None:
    if not math.isfinite(target):
        raise ConfigError(f"--target {target} cannot be used: a finite loss is needed")
    if not 0 < alpha < 1:
        raise ConfigError(f"--alpha {alpha} cannot be used: it lies between 0 and 1")
    if sigma is not None and not (math.isfinite(sigma) and sigma > 0):
        raise ConfigError(f"--sigma {sigma} cannot be used: it is a standard deviation above 0")


def read_losses(path: Path) -> list[float]:
    """One loss a line, or the column `val_loss` of a CSV file with a header."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--losses {path} cannot be read: {reason}") from None
    rows = [
        (number, [cell.strip() for cell in row])
        for number, row in enumerate(csv.reader(io.StringIO(text)), 1)
        if any(cell.strip() for cell in row)
    ]
    column = 0
    if rows and not all(_is_number(cell) for cell in rows[0][1]):
        header = rows.pop(0)[1]
        if COLUMN not in header:
            raise ConfigError(
                f"--losses {path} has no column {COLUMN!r}, only {', '.join(header)}; name the "
                f"column {COLUMN} or give one loss a line"
            )
        column = header.index(COLUMN)
    elif rows and len(rows[0][1]) > 1:
        raise ConfigError(
            f"--losses {path} has {len(rows[0][1])} columns and no header; name the column of "
            f"losses {COLUMN} or give one loss a line"
        )
    if not rows:
        raise ConfigError(f"--losses {path} holds no losses; give one a line")
    losses = []
    for number, row in rows:
        cell = row[column] if column < len(row) else ""
        if not _is_number(cell):
            raise ConfigError(f"--losses {path}, line {number}: {cell!r} is not a number")
        losses.append(float(cell))
    return losses


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class FinishedRun:
    """What verify needs of a run folder."""

    path: Path
    loss: float
    steps: int
    recipe: str
    seed: int
    target: float | None


def read_run(path: Path) -> FinishedRun:
    """The final validation loss in a run's summary; an unfinished run is misuse."""
    summary = path / "summary.json"
    try:
        found: dict[str, Any] = json.loads(summary.read_text(encoding="utf-8"))
        if found.get("stopped_early"):
            raise ConfigError(f"run {path} was stopped before its end; resume it, or leave it out")
        loss = found["val_loss"]
        return FinishedRun(
            path,
            math.nan if loss is None else float(loss),  # what is not finite is null in JSON
            int(found["steps"]),
            str(found["recipe"]),
            int(found["seed"]),
            found.get("target"),
        )
    except FileNotFoundError:
        what = "has not finished" if (path / "config.toml").exists() else "is not a run folder"
        raise ConfigError(f"{path} {what}: it has no summary.json") from None
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{summary} cannot be used as a run's summary: {error!r}") from None


def gather(paths: Sequence[Path]) -> tuple[list[FinishedRun], list[str]]:
    """Read runs, refuse one given twice, and note what would make the test misleading."""
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise ConfigError(f"run {path} is given twice; each run counts once")
        seen.add(path.resolve())
    runs = [read_run(path) for path in paths]
    notes = []
    if len({run.recipe for run in runs}) > 1:
        notes.append("the runs follow different recipes: "
                     + ", ".join(sorted({run.recipe for run in runs})))  # fmt: skip
    if len({run.steps for run in runs}) > 1:
        notes.append("the runs stop at different steps; a stop chosen by a run's own loss "
                     "flatters the mean")  # fmt: skip
    if any(_stops_at_target(path) for path in paths):
        notes.append("runs that stop at the first loss at the target are below it by "
                     "construction; for a claim, let them go to the end")  # fmt: skip
    if len({(run.recipe, run.seed) for run in runs}) < len(runs):
        notes.append("some runs share a seed; equal runs are not independent")
    return runs, notes


def _stops_at_target(path: Path) -> bool:
    run = RunFolder(path)
    return run.config.exists() and run.load_config().train.stop == "target"


def common_target(runs: Sequence[FinishedRun]) -> float:
    """The target the runs themselves were given, when they agree on one."""
    targets = {run.target for run in runs}
    if len(targets) == 1 and (target := targets.pop()):
        return float(target)
    raise ConfigError("--target is needed: the runs do not state one target loss")
