"""When to save, and how without holding up training.

The training thread pays for a copy of the tensors; a background thread hashes, flushes and renames.
A write that fails (a full disk, say) costs nothing but the new checkpoint: the run says so and goes
on with the older one.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from speedrun.errors import RunError
from speedrun.train import checkpoint
from speedrun.train.request import Interval


class CheckpointWriter:
    """Saves into `root`, keeps the last `keep` checkpoints and the best validated one.

    `val_losses` are the validation losses of earlier processes of the run, by step.
    """

    def __init__(
        self,
        root: Path,
        every: Interval,
        keep: int,
        on_event: Callable[..., None],
        *,
        writes: bool,
        val_losses: Mapping[int, float] | None = None,
    ) -> None:
        self.root, self._every, self._keep, self._on_event = root, every, keep, on_event
        self._writes, self._val_losses = writes, dict(val_losses or {})
        self._last = time.monotonic()
        self._writer = ThreadPoolExecutor(1, "checkpoint-writer")
        self._pending: Future[None] | None = None
        self.failure: str | None = None  # why the last checkpoint could not be written

    def due_at(self, step: int) -> bool:
        """By its number: all ranks know that before anybody asks."""
        return bool(self._every.steps) and self.due(step)

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
            self._val_losses[progress["val_step"]] = progress["val_loss"]
        copied = {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.items()}
        self._pending = self._writer.submit(self._write, dict(meta), copied, optimizer)

    def finish(self) -> None:
        """Wait for the checkpoint under way."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def forget_after(self, step: int) -> None:
        """Remove checkpoints of steps after `step`, which a rewind has undone."""
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
            self._on_event("checkpoint_failed", step=meta["step"], reason=self.failure)
            return
        self.failure = None
        seconds = time.perf_counter() - begun
        self._on_event("checkpoint", step=meta["step"], folder=saved.name, write_seconds=seconds)
        if not meta["progress"]["nonfinite"]:  # else an older one may be the last good one
            self._prune(meta["step"])

    def _prune(self, step: int) -> None:
        # Later ones were passed over as damaged when the run was resumed: they count for nothing.
        whole = [f for f in checkpoint.folders(self.root) if checkpoint.step_of(f) <= step]
        scored = [f for f in whole if checkpoint.step_of(f) in self._val_losses]
        best = sorted(scored, key=lambda f: self._val_losses[checkpoint.step_of(f)])[:1]
        for folder in set(whole[: -self._keep]) - set(best):
            shutil.rmtree(folder, ignore_errors=True)
