"""When to save, and how without holding up training.

The training thread pays for a copy of the tensors; a background thread hashes, flushes and renames.
A write that fails (a full disk, say) costs nothing but the new checkpoint: the run says so and goes
on with the older one.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from speedrun.errors import ConfigError, RunError
from speedrun.train import checkpoint

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_seconds(text: str, option: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not found:
        raise ConfigError(f"{option} {text!r} cannot be used: write a time such as 90s, 5m or 1h")
    return float(found[1]) * UNITS[found[2]]


@dataclass(frozen=True)
class Every:
    """A checkpoint every so many steps, or seconds, or neither."""

    steps: int | None = None
    seconds: float | None = None

    @staticmethod
    def parse(text: str) -> Every:
        if not text:
            return Every()
        if text.isdigit() and int(text) > 0:
            return Every(steps=int(text))
        if not re.fullmatch(r"\d+(?:\.\d+)?[smh]", text):
            raise ConfigError(
                f"--checkpoint-every {text!r} cannot be used: write steps (50) or a time (5m)"
            )
        return Every(seconds=parse_seconds(text, "--checkpoint-every"))


NEVER = Every()


class Keeper:
    """Saves into `root`, keeps the last `keep` checkpoints and the best validated one."""

    def __init__(
        self, root: Path, every: Every, keep: int, say: Callable[..., None], *, writes: bool
    ) -> None:
        self.root, self._every, self._keep, self._say = root, every, keep, say
        self._writes = writes
        self._last = time.monotonic()
        self._writer = ThreadPoolExecutor(1, "checkpoint-writer")
        self._pending: Future[None] | None = None

    def due(self, step: int) -> bool:
        if self._every.steps:
            return step % self._every.steps == 0
        return (
            self._every.seconds is not None and time.monotonic() - self._last >= self._every.seconds
        )

    def save(
        self, meta: Mapping[str, Any], model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
    ) -> None:
        """Copy the model and hand over to the writer; `optimizer` is a copy already."""
        self._last = time.monotonic()
        if not self._writes:
            return
        self.finish()
        copied = {name: tensor.detach().cpu().clone() for name, tensor in model.items()}
        self._pending = self._writer.submit(self._write, dict(meta), copied, optimizer)

    def finish(self) -> None:
        """Wait for the checkpoint under way."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        self.finish()
        self._writer.shutdown()

    def _write(
        self, meta: dict[str, Any], model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
    ) -> None:
        begun = time.perf_counter()
        try:
            saved = checkpoint.save(self.root, meta, model, optimizer)
        except RunError as error:
            self._say("checkpoint_failed", step=meta["step"], reason=str(error))
            return
        seconds = time.perf_counter() - begun
        self._say("checkpoint", step=meta["step"], folder=saved.name, write_seconds=seconds)
        self._prune()

    def _prune(self) -> None:
        folders = sorted(self.root.glob("step-*"), key=lambda path: path.name)
        kept = set(folders[-self._keep :]) | {best(folders)}
        for folder in folders:
            if folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)


def best(folders: list[Path]) -> Path | None:
    """The checkpoint with the lowest validation loss measured at its own step."""
    scores: dict[Path, float] = {}
    for folder in folders:
        try:
            progress = json.loads((folder / checkpoint.META).read_text())["progress"]
        except (OSError, ValueError, KeyError):
            continue
        if progress["val_step"] == progress["step"]:
            scores[folder] = progress["val_loss"]
    return min(scores, key=lambda folder: scores[folder]) if scores else None
