"""A run as it is put beside others, and runs that are one side of a comparison."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from speedrun.config.files import built_in, names
from speedrun.config.schema import Config
from speedrun.errors import ConfigError, quoted, shortened
from speedrun.train.run import RunFolder
from speedrun.train.summary import Environment, Summary


@dataclass(frozen=True)
class Run:
    folder: RunFolder
    config: Config
    summary: Summary | None
    environment: Environment | None
    losses: Mapping[int, float]  # of validation, by tokens trained on
    dataset: str | None  # its fingerprint

    @cached_property
    def entry(self) -> dict[str, Any]:
        """What is known of the run by the names of `RESULTS`."""
        if self.summary:
            return dict(self.summary)
        last = max(self.losses, default=None)
        return {} if last is None else {"tokens": last, "val_loss": self.losses[last]}


@dataclass(frozen=True)
class Side:
    name: str
    runs: tuple[Run, ...]

    @property
    def config(self) -> Config:
        return self.runs[0].config

    @property
    def seeds(self) -> list[int]:
        return [run.config.train.seed for run in self.runs]


def read_run(path: Path) -> Run:
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise ConfigError(_no_run(path))
    config, summary = folder.load_config(), folder.read_summary()
    rows = folder.read_metrics()
    losses = {
        row["tokens"]: float(row["loss"])
        for row in rows
        if row["kind"] == "val" and _is_number(row.get("tokens")) and _is_number(row.get("loss"))
    }
    starts = [row for row in rows if row["kind"] in ("start", "resume")]
    dataset = summary.dataset_fingerprint if summary else None
    dataset = dataset or next((one.get("dataset_fingerprint") for one in starts), None)
    place = Environment.read(folder.environment)
    return Run(folder, config, summary, place, losses, dataset)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _no_run(path: Path) -> str:
    if path.is_dir():
        inside = f"; `speedrun runs {shlex.quote(str(path))}` lists the runs in it"
        return f"{shortened(path)} is not a run folder: it has no config.toml{inside}"
    if path.exists():
        return f"{shortened(path)} is a file; name run folders, which `speedrun runs` lists"
    hint = "`speedrun runs` lists those there are"
    if str(path) in built_in("recipe"):
        hint = f"it is a recipe: `speedrun recipes diff {path} OTHER` compares recipes"
    elif str(path) in names("track"):
        hint = f"it is a track: `speedrun tracks diff {path} OTHER` compares tracks"
    return f"there is no run folder {quoted(str(path))}; {hint}"
