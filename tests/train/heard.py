"""Runs of one process for tests, a display that keeps what it is told, and what a run left."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speedrun.config.schema import Config
from speedrun.terminal.display import PlainDisplay
from speedrun.train import checkpoint
from speedrun.train.checkpoint_writer import CheckpointWriter
from speedrun.train.guard import Sink
from speedrun.train.health import Outcome
from speedrun.train.log import Display, Log, StepView
from speedrun.train.request import Interval, Request
from speedrun.train.run import RunFolder
from speedrun.train.session import run_training
from speedrun.train.signals import Pending
from speedrun.train.summary import Summary
from speedrun.train.trainer import Trainer
from speedrun.train.world import World

Make = Callable[..., Config]
ALONE = World.alone(torch.device("cpu"))


class Heard(PlainDisplay):
    """Presses Ctrl-C at a step of the run, or after so many steps it was shown; `at`: does more."""

    def __init__(
        self,
        at_step: int = -1,
        *,
        after: int = -1,
        at: Mapping[int, Callable[[], object]] | None = None,
    ) -> None:
        self.lines: list[str] = []
        super().__init__(self.lines.append)
        self._at_step, self._after, self._shown, self._at = at_step, after, 0, at or {}

    def step(self, view: StepView) -> None:
        super().step(view)
        self._shown += 1
        self._at.get(view.step, lambda: None)()
        if view.step == self._at_step or self._shown == self._after:
            signal.raise_signal(signal.SIGINT)


def step(trainer: Trainer, asked: Callable[[], Pending] = Pending) -> Outcome:
    """One step, and what it came to."""
    trainer.step(asked)
    *_, outcome = trainer.outcomes(everything=True)
    return outcome


def train(config: Config, folder: Path, display: Heard | None = None, **how: Any) -> Summary:
    run, data = RunFolder(folder), Path(config.data.dir)
    return run_training(config, run, data, display or Heard(), ALONE, Request(**how))[0]


def quiet_log(config: Config, *sinks: Sink, display: Display | None = None) -> Log:
    shown, device = display or Display(), ALONE.device
    named = {
        "metrics" if isinstance(sink, RunFolder) else type(sink).__name__: sink for sink in sinks
    }
    return Log(config, named, shown, flops_per_token=1, device=device)


def writer_into(
    folder: Path,
    keep: int = 9,
    every: Interval | None = None,
    on_event: Callable[..., None] = lambda *_, **__: None,
    val_losses: Mapping[int, float] | None = None,
) -> CheckpointWriter:
    return CheckpointWriter(
        folder, every or Interval(), keep, on_event, writes=True, val_losses=val_losses
    )


def values(folder: Path, kind: str, key: str = "step") -> list[Any]:
    """One value of every record of a kind."""
    return [row[key] for row in RunFolder(folder).read_metrics(kind)]


def losses(folder: Path, kind: str = "train") -> list[float]:
    return values(folder, kind, "loss")


def newest(root: Path) -> checkpoint.Checkpoint:
    """The newest of the checkpoints, all of which are whole."""
    found, skipped = checkpoint.latest(root)
    assert found is not None
    assert skipped == []
    return found


def tensors(folder: Path) -> dict[str, Tensor]:
    """Weights and moments at the end of a run."""
    found = newest(folder / "checkpoints")
    return found.model() | found.optimizer()


def same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
