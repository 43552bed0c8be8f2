"""The training loop: a step on one screen.

schedules -> next batch -> forward and backward over microbatches -> finite check agreed by all
ranks -> optimizer -> log -> checkpoint if due. Validation and checkpoints stand outside the
training clock. Everything a step needs follows from its number and the batch's, so a resumed run
does what the uninterrupted one would have done.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from speedrun.config.schema import Config
from speedrun.data.loader import Batch
from speedrun.train.clock import Clock
from speedrun.train.health import agree
from speedrun.train.keeper import Keeper
from speedrun.train.log import Log
from speedrun.train.recovery import Recovery
from speedrun.train.setup import Parts
from speedrun.train.signals import Controls, exit_code
from speedrun.train.validate import Validation, validate


@dataclass
class Progress:
    """Where a run stands; with the tensors, the whole state of a run."""

    step: int = 0  # updates done or skipped
    batch: int = 0  # global batches taken; ahead of `step` only after a rewind
    seconds: float = 0.0
    earlier_wall: float = 0.0  # wall seconds of the processes this run was resumed from
    val_step: int = -1
    val_loss: float | None = None
    val_bpb: float | None = None
    tokens_to_target: int | None = None
    seconds_to_target: float | None = None
    wall_seconds_to_target: float | None = None
    recent: list[float] = field(default_factory=list)  # finite losses that spikes are measured by
    nonfinite: int = 0  # in a row
    rewinds: int = 0

    def validated(self, result: Validation, tokens: int, target: float) -> None:
        self.val_step, self.val_loss, self.val_bpb = self.step, result.loss, result.bits_per_byte
        if self.tokens_to_target is None and target and result.loss <= target:
            self.tokens_to_target, self.seconds_to_target = tokens, self.seconds
            self.wall_seconds_to_target = self.wall

    def finished(self, config: Config) -> bool:
        early = config.train.stop == "target" and self.tokens_to_target is not None
        return early or self.step >= config.steps

    @property
    def wall(self) -> float:
        """Wall seconds so far, of all the processes whose work is still there."""
        return self.earlier_wall + Clock.wall()

    def plain(self) -> dict[str, Any]:
        """To be saved; to the process that loads it, this one is an earlier one."""
        return {**asdict(self), "earlier_wall": self.wall}


def split(batch: Batch, parts: int) -> list[Batch]:
    """The batch as `parts` equal runs of rows."""
    fields = (batch.inputs, batch.targets, batch.documents, batch.positions)
    return [Batch(*piece) for piece in zip(*(f.chunk(parts) for f in fields), strict=True)]


def forward_backward(parts: Parts, batch: Batch) -> Tensor:
    """Gradients of the batch's mean loss, whatever it is cut into; returns that loss.

    Ranks average their gradients during the last backward only.
    """
    total = torch.zeros((), device=parts.world.device)
    for index, micro in enumerate(split(batch, parts.microbatches)):
        last = index == parts.microbatches - 1
        with nullcontext() if last else parts.no_sync():
            loss = parts.training_loss(micro) / parts.microbatches
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


def train(
    config: Config, parts: Parts, progress: Progress, log: Log, keeper: Keeper, controls: Controls
) -> int:
    """Train from `progress` to the end (0) or to a requested stop (its exit code)."""
    clock = Clock(parts.world.device, progress.seconds)
    recovery = Recovery(config, parts, progress, log, keeper)
    if progress.val_step < 0:
        run_validation(config, parts, progress, log)
    clock.start()
    while not progress.finished(config):
        rate = parts.set_schedule(progress.step)
        batch = next(parts.loader)
        loss = forward_backward(parts, batch)
        wishes = (*controls.wishes(), keeper.due(progress.step + 1))
        agreed = agree(parts.world, loss, parts.model.parameters(), wishes)
        if agreed.finite:
            parts.clip_gradients(agreed.grad_norm)
            parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=True)
        progress.step, progress.batch = progress.step + 1, progress.batch + 1
        progress.seconds = clock.seconds
        log.step(progress, agreed, rate, parts.loader.wait_seconds)
        interrupt, terminate, late, asked, due = agreed.wishes
        stop = exit_code(interrupt, terminate, late)
        with clock.paused():
            if progress.step % config.validation.every == 0 or progress.step == config.steps:
                run_validation(config, parts, progress, log)
            ends = stop is not None or progress.finished(config)
            recovery.after_step(agreed, save=asked or due or ends)
        if stop is not None:
            return stop
    return 0


def run_validation(config: Config, parts: Parts, progress: Progress, log: Log) -> None:
    """Validate where the run stands, with the window of its step or a wider one."""
    parts.set_schedule(progress.step)
    parts.attention.widen(config.validation.window)
    result = validate(parts.loss_of, parts.validation, parts.token_bytes, parts.world)
    progress.validated(result, progress.step * config.batch.tokens, config.train.target)
    log.validation(progress, result)
