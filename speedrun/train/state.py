"""What stands in a folder of runs: of each its recipe, track, loss, and whether it goes on.

Every folder gets an answer, whatever is in it: damaged, empty and foreign ones are told as such.
Nothing here needs torch, and of a run only its config, its result and the end of its log are read,
so that hundreds of runs are listed in a second.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from speedrun.config.experiment import SEED, STOP, experiment_hash
from speedrun.config.own_code import own_code
from speedrun.config.resolve import resolve
from speedrun.config.schema import Config, DataConfig
from speedrun.errors import ConfigError, SpeedrunError
from speedrun.train import checkpoint
from speedrun.train.run import RunFolder
from speedrun.train.summary import Summary

State = Literal["running", "finished", "stopped", "failed", "damaged", "foreign"]
STATES: tuple[State, ...] = ("running", "finished", "stopped", "failed", "damaged", "foreign")
RECORDS = ("config.toml", "summary.json", "metrics.jsonl", "checkpoints")
MANIFEST = "manifest.json"
DEEPEST = 4  # folders below the one that is asked for: a race's runs are two below


@dataclass(frozen=True)
class Listed:
    """One folder; what is not known of it is None."""

    path: str
    state: State
    detail: str = ""  # why, in a few words
    recipe: str | None = None
    track: str | None = None
    dataset: str | None = None  # where it is not the track's own
    dataset_fingerprint: str | None = None
    experiment_sha256: str | None = None  # of what was run, the seed apart
    seed: int | None = None
    steps: int | None = None
    of_steps: int | None = None
    val_loss: float | None = None
    val_step: int | None = None  # after which it was measured
    target: float | None = None
    reached_target: bool = False
    own_code: dict[str, str] | None = None  # of the user's: name and hash by table
    resumable: bool = False
    date: float = 0.0  # of the last record, in seconds since 1970

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def is_run(folder: Path) -> bool:
    """Whether it is a run, or what is left of one."""
    return any((folder / name).exists() for name in RECORDS)


def find_runs(root: Path) -> Iterator[Path]:
    """The runs in a folder or below it."""
    yield from _runs_below(root, DEEPEST)


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / MANIFEST).exists():  # a dataset
        return
    if is_run(folder):
        yield folder
    elif depth:
        for inside in _folders(folder):
            yield from _runs_below(inside, depth - 1)


def _folders(root: Path) -> list[Path]:
    try:
        with os.scandir(root) as entries:
            found = [entry.name for entry in entries if entry.is_dir() and entry.name[0] != "."]
    except OSError:
        return []
    return [root / name for name in sorted(found)]


def look(folder: Path) -> Listed:
    """Where a run stands; whatever is in the folder, this is an answer and no error."""
    try:
        return _look(RunFolder(folder))
    except SpeedrunError as error:
        why = str(error).replace(f"{folder}{os.sep}", "")
        return Listed(str(folder), "damaged", why, date=_date(RunFolder(folder)))
    except OSError as error:
        return Listed(str(folder), "damaged", f"{error.filename}: {error.strerror}")
    except RecursionError:
        return Listed(str(folder), "damaged", "a record is nested too deeply to be read")


def _look(run: RunFolder) -> Listed:
    if not is_run(run.path):
        empty = not any(run.path.iterdir())
        return Listed(str(run.path), "foreign", "it is empty" if empty else "it has no config.toml",
                      date=run.path.stat().st_mtime)  # fmt: skip
    running = run.in_use()
    if running and not run.config.is_file():
        return Listed(str(run.path), "running", "it is about to begin", date=_date(run))
    if not run.config.is_file():
        return Listed(str(run.path), "damaged", "it has no config.toml", date=_date(run))
    config = run.load_config()
    if not config.recipe:
        return Listed(str(run.path), "damaged", "its config.toml names no recipe", date=_date(run))
    summary = None if running else run.read_summary()
    last = run.last_metrics() if running or summary is None or _goes_beyond(run, summary) else {}
    steps, loss = _number(last.get("train"), "step"), _number(last.get("val"), "loss")
    val_step = _number(last.get("val"), "step")
    if summary and not last:
        steps, loss = summary.steps, summary.val_loss
        val_step = steps if run.finished(config) else _last_validation(run)
    state, detail, resumable = _state(run, config, summary, running, last)
    return Listed(
        str(run.path),
        state,
        detail,
        recipe=config.recipe,
        track=config.track,
        dataset=_other_dataset(config),
        dataset_fingerprint=summary.dataset_fingerprint if summary else None,
        experiment_sha256=experiment_hash(config, but=(SEED, STOP)),
        seed=config.train.seed,
        steps=None if steps is None else int(steps),
        of_steps=config.steps,
        val_loss=loss,
        val_step=None if val_step is None else int(val_step),
        target=config.train.target or None,
        reached_target=bool(summary and summary.reached_target),
        own_code=own_code(config) or None,
        resumable=resumable,
        date=_date(run),
    )


def _state(
    run: RunFolder, config: Config, summary: Summary | None, running: bool, last: dict[str, Any]
) -> tuple[State, str, bool]:
    """The state, why, and whether `train --resume` goes on from there."""
    if running:
        return "running", "", False
    if summary and run.finished(config):
        if summary.val_loss is None:
            return "failed", "its last loss is not finite", False
        return "finished", "", False
    found, torn = _newest_checkpoint(run)
    if "train" in last and last["train"].get("loss") is None:
        return "failed", f"the loss is not finite at step {last['train'].get('step')}", False
    if found is not None:
        return "stopped", f"at step {found:,}", True
    if torn:
        return "damaged", torn, False
    if summary:
        return "stopped", "its checkpoints are gone", False
    return "stopped", "before its first checkpoint", True


def _last_validation(run: RunFolder) -> float | None:
    """Its step: a run that was stopped has gone on without one."""
    return _number(run.last_metrics().get("val"), "step")


def _goes_beyond(run: RunFolder, summary: Summary) -> bool:
    """Whether the run was resumed after its result was written, and then killed."""
    steps = [checkpoint.step_of(folder) for folder in checkpoint.folders(run.checkpoints)]
    return max(steps, default=0) > summary.steps


def _newest_checkpoint(run: RunFolder) -> tuple[int | None, str]:
    """The step of the newest one whose manifest is whole; of a damaged one, why."""
    why = ""
    for folder in reversed(checkpoint.folders(run.checkpoints)):
        try:
            return checkpoint.read(folder, verify=False).step, ""
        except SpeedrunError as error:
            why = why or str(error)
    return None, why


def _number(row: dict[str, Any] | None, key: str) -> float | None:
    value = (row or {}).get(key)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _date(run: RunFolder) -> float:
    """When the last record was written."""
    for paths in ((run.metrics, run.summary), (run.config, run.path)):
        if found := [path.stat().st_mtime for path in paths if path.exists()]:
            return max(found)
    return 0.0


def _other_dataset(config: Config) -> str | None:
    """The text, where the track would have taken another."""
    own, data = _data_of_track(config.track), config.data
    if own and (own.dir, own.sources) == (data.dir, data.sources):
        return None
    return data.dir or ", ".join(data.sources)


@cache
def _data_of_track(track: str) -> DataConfig | None:
    try:
        return resolve(track=track).config.data if track else None
    except ConfigError:  # a file of the user's that is not here
        return None


def list_runs(folders: Sequence[Path]) -> list[Listed]:
    """Each folder once, in the order in which they are found.

    Of several that are named, one without runs is listed too, to tell that it is none.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        inside = [*find_runs(folder)]
        named = [folder] if len(folders) > 1 and folder.is_dir() else []
        found |= dict.fromkeys(inside or named)
    return [look(folder) for folder in found]
