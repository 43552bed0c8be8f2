"""The folder of one run, and what is written into it.

config.toml       the resolved config, enough to repeat the run
environment.json  versions, hardware, code, the command
metrics.jsonl     one JSON object a line: kind, step, tokens, seconds, loss, ...
summary.json      the result
tokenizer/        a copy of the dataset's tokenizer, so that the run can be sampled anywhere
checkpoints/      step-NNNNNN folders
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speedrun.config.resolve import from_toml, to_toml
from speedrun.config.schema import Config
from speedrun.errors import RunError


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.tokenizer = path / "tokenizer"
        self.config = path / "config.toml"
        self.environment = path / "environment.json"

    @staticmethod
    def default(config: Config) -> RunFolder:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return RunFolder(
            Path("runs") / f"{config.recipe}-{config.track}-s{config.train.seed}-{stamp}"
        )

    def refuse_if_taken(self) -> None:
        if self.config.exists():
            raise RunError(
                f"run folder {self.path} already holds a run; continue it with "
                f"`speedrun train --resume --run {self.path}`, or choose another --run"
            )

    def discard(self, mine: bool) -> None:
        """Make room for a fresh start where an attempt left no checkpoint."""
        if mine and self.config.exists():
            for path in (self.config, self.metrics, self.summary):
                path.unlink(missing_ok=True)

    @contextmanager
    def locked(self, needed: bool) -> Iterator[None]:
        """Hold the folder for this process; refuse one that a live process holds."""
        if not needed:
            yield
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunError(f"run folder {self.path} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise RunError(
                f"run folder {self.path} is in use by another process; wait for it or stop it"
            ) from None
        try:
            for left in self.checkpoints.glob(".step-*.partial"):
                shutil.rmtree(left, ignore_errors=True)
            yield
        finally:
            os.close(handle)

    def create(self, config: Config) -> None:
        self.refuse_if_taken()
        try:
            self.metrics.touch()
            self.config.write_text(self.config_text(config), encoding="utf-8")
        except OSError as error:
            raise RunError(f"run folder {self.path} cannot be written: {error.strerror}") from None

    @staticmethod
    def config_text(config: Config) -> str:
        return to_toml(config)

    def load_config(self) -> Config:
        if not self.config.is_file():
            raise RunError(f"{self.path} is not a run folder: it has no config.toml")
        return from_toml(self.config)

    def log(self, kind: str, **values: Any) -> None:
        # NaN is not JSON: what is not finite is null.
        plain = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        line = json.dumps({"kind": kind, **plain}, allow_nan=False)
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def read_metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Logged objects in order; a line cut short by a crash is left out."""
        rows = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        return [row for row in rows if kind is None or row["kind"] == kind]

    def truncate_metrics(self, step: int, val_step: int) -> None:
        """Forget what was logged after the checkpoint, which the resumed run does again."""
        kept = [
            row
            for row in self.read_metrics()
            if row.get("step", 0) <= (val_step if row["kind"] == "val" else step)
        ]
        temporary = self.metrics.with_suffix(".partial")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        temporary.replace(self.metrics)

    def write_summary(self, summary: dict[str, Any]) -> None:
        temporary = self.summary.with_suffix(".partial")
        temporary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        temporary.replace(self.summary)
