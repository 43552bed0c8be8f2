"""When to save, and how without holding up training.

The training thread pays for a copy of the tensors; a background thread hashes, flushes and renames.
A write that fails (a full disk, say) costs nothing but the new checkpoint: the run says so and goes
on with the older one.
"""

from __future__ import annotations

import math
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
    """Saves into `root`, keeps the last `keep` checkpoints and the best validated one.

    `scores` are the validation losses known so far, by step. A checkpoint is often saved before its
    step is validated, so its score arrives with the next one.
    """

    def __init__(
        self,
        root: Path,
        every: Every,
        keep: int,
        say: Callable[..., None],
        *,
        writes: bool,
        scores: Mapping[int, float] | None = None,
    ) -> None:
        self.root, self._every, self._keep, self._say = root, every, keep, say
        self._writes, self._scores = writes, dict(scores or {})
        self._last = time.monotonic()
        self._writer = ThreadPoolExecutor(1, "checkpoint-writer")
        self._pending: Future[None] | None = None
        self.failure: str | None = None  # why the last checkpoint could not be written

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
        progress = meta["progress"]
        if progress["val_loss"] is not None and math.isfinite(progress["val_loss"]):
            self._scores[progress["val_step"]] = progress["val_loss"]
        copied = {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.items()}
        self._pending = self._writer.submit(self._write, dict(meta), copied, optimizer)

    def finish(self) -> None:
        """Wait for the checkpoint under way."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def forget_after(self, step: int) -> None:
        """Remove checkpoints of a future that was given up."""
        for folder in checkpoint.folders(self.root) if self._writes else ():
            if checkpoint.step_of(folder) > step:
                shutil.rmtree(folder, ignore_errors=True)

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
            self.failure = str(error)
            self._say("checkpoint_failed", step=meta["step"], reason=self.failure)
            return
        self.failure = None
        seconds = time.perf_counter() - begun
        self._say("checkpoint", step=meta["step"], folder=saved.name, write_seconds=seconds)
        if not meta["progress"]["nonfinite"]:  # else an older one may be the last good one
            self._prune(meta["step"])

    def _prune(self, step: int) -> None:
        # Later ones were passed over as damaged when the run was resumed: they count for nothing.
        whole = [f for f in checkpoint.folders(self.root) if checkpoint.step_of(f) <= step]
        scored = [f for f in whole if checkpoint.step_of(f) in self._scores]
        best = sorted(scored, key=lambda f: self._scores[checkpoint.step_of(f)])[:1]
        for folder in set(whole[: -self._keep]) - set(best):
            shutil.rmtree(folder, ignore_errors=True)
