"""The loop: which verbs it calls when, and on which side of the clock."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from speedrun.config.schema import Config
from speedrun.data.loader import Batch
from speedrun.train.clock import Clock
from speedrun.train.launch import SHUTDOWN, launch
from speedrun.train.log import Log, StepView
from speedrun.train.loop import train
from speedrun.train.progress import Progress
from speedrun.train.request import Interval, Request
from speedrun.train.run import RunFolder
from speedrun.train.signals import Controls, Pending
from speedrun.train.trainer import Trainer
from tests.train.heard import ALONE, Heard, Make, quiet_log, same_bits, step, writer_into
from tests.train.heard import train as run_once


class Asking(Controls):
    """As if signals were found the given times that the loop looks for them, counted from 1.

    It looks in every step and after every validation, of which the first follows step 1.
    """

    def __init__(self, at: dict[int, Pending]) -> None:
        super().__init__()
        self._at, self._looks = at, 0

    def pending(self) -> Pending:
        self._looks += 1
        return self._at.get(self._looks, Pending())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the loop does, with a mark where the clock stands still."""
    seen: list[str] = []
    running = False

    def watch(owner: type, name: str) -> None:
        honest = getattr(owner, name)

        def watched(self: Any, *arguments: Any) -> Any:
            step = self.progress.step if isinstance(self, Trainer) else arguments[0].step
            result = honest(self, *arguments)
            seen.append(f"{'' if running else 'off: '}{owner.__name__}.{name} {step}")
            return result

        monkeypatch.setattr(owner, name, watched)

    for verb in ("step", "validate", "measure_peak", "save", "rewind"):
        watch(Trainer, verb)
    for verb in ("step", "validation"):
        watch(Log, verb)
    start, paused = Clock.start, Clock.paused

    def started(self: Clock) -> None:
        nonlocal running
        running = True
        start(self)

    @contextmanager
    def stopped(self: Clock) -> Iterator[None]:
        nonlocal running
        running = False
        with paused(self):
            yield

    monkeypatch.setattr(Clock, "start", started)
    monkeypatch.setattr(Clock, "paused", stopped)
    return seen


def run(
    config: Config, folder: Path, controls: Controls | None = None, every: int | None = None
) -> tuple[int, Progress]:
    trainer = Trainer(config, ALONE, Path(config.data.dir))
    log, writer = quiet_log(config), writer_into(folder, every=Interval(steps=every))
    with trainer.loader, closing(writer):
        return train(trainer, log, writer, controls or Asking({})), trainer.progress


def test_steps_are_on_the_clock_and_validation_and_checkpoints_off_it(
    tiny: Make, tmp_path: Path, calls: list[str]
) -> None:
    code, progress = run(tiny("train.steps=4", "validation.every=2"), tmp_path, every=3)
    assert code == 0
    assert progress.step == 4
    assert calls == [
        "Trainer.step 0", "Log.step 1", "off: Trainer.measure_peak 1",
        "off: Trainer.validate 0", "off: Log.validation 0",
        "Trainer.step 1", "Log.step 2", "off: Trainer.validate 2", "off: Log.validation 2",
        "Trainer.step 2", "Log.step 3", "off: Trainer.save 3",
        "Trainer.step 3", "Log.step 4", "off: Trainer.measure_peak 4",
        "off: Trainer.validate 4", "off: Log.validation 4", "off: Trainer.save 4",
    ]  # fmt: skip


def test_the_validation_of_step_0_is_of_the_weights_before_the_first_step(
    tiny: Make, tmp_path: Path
) -> None:
    config = tiny("train.steps=2", "validation.every=1")
    untouched = Trainer(config, ALONE, Path(config.data.dir))
    stepped = Trainer(config, ALONE, Path(config.data.dir))
    with untouched.loader, stepped.loader:
        first = untouched.validate().loss
        step(stepped)
        after_one = stepped.validate().loss
        step(stepped)
    seen: list[tuple[int, float, float]] = []

    class Sink:
        def log(self, kind: str, **values: Any) -> None:
            if kind == "val":
                seen.append((values["step"], values["seconds"], values["loss"]))

    trainer = Trainer(config, ALONE, Path(config.data.dir))
    with trainer.loader, closing(writer_into(tmp_path)) as writer:
        train(trainer, quiet_log(config, Sink()), writer, Asking({}))
    assert [step for step, _, _ in seen] == [0, 1, 2]
    assert seen[0] == (0, 0.0, first)
    assert seen[1][2] == after_one != first
    assert same_bits(trainer.model.state_dict(), stepped.model.state_dict())


def test_a_stop_finishes_its_step_saves_and_gives_its_code(
    tiny: Make, tmp_path: Path, calls: list[str]
) -> None:
    code, progress = run(tiny(), tmp_path, Asking({4: Pending(terminate=True)}))
    assert (code, progress.step) == (143, 3)
    assert calls[-1] == "off: Trainer.save 3"


@pytest.mark.parametrize("step", [0, 4])
def test_a_signal_during_a_validation_ends_the_run_there(
    step: int, tiny: Make, tmp_path: Path
) -> None:
    """It waited for one more whole step. The validation of step 0 is made after step 1."""

    class Validated(Heard):
        def validation(self, view: StepView) -> None:
            super().validation(view)
            if view.step == step:
                signal.raise_signal(signal.SIGINT)

    summary = run_once(tiny("train.steps=8", "validation.every=4"), tmp_path, Validated())
    assert (summary.steps, summary.exit_code) == (max(1, step), 130)
    assert RunFolder(tmp_path).checkpoint(max(1, step)).step == max(1, step)


def test_ranks_have_time_for_a_checkpoint_when_they_are_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torchrun kills them after 30 s of its own accord; what the user has set is left alone."""
    from torch.distributed.launcher.api import LaunchConfig

    limits: list[int | None] = []

    def main(_: list[str]) -> None:
        config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2)
        limits.append(config.shutdown_timeout)

    monkeypatch.setattr("torch.distributed.run.main", main)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    before = signal.getsignal(signal.SIGUSR1)
    for given in (None, "45"):
        monkeypatch.delenv(SHUTDOWN, raising=False)
        if given is not None:
            monkeypatch.setenv(SHUTDOWN, given)
        with pytest.raises(SystemExit) as ended:
            launch(Request(recipe="modern", ranks=2), RunFolder(tmp_path))
        assert ended.value.code == 0
    signal.signal(signal.SIGUSR1, before)
    assert limits == [300, 45]


def test_a_signal_during_a_step_ends_the_run_with_that_step(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Trainer.training_loss

    def interrupted(self: Trainer, batch: Batch) -> Tensor:
        if self.progress.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return honest(self, batch)

    monkeypatch.setattr(Trainer, "training_loss", interrupted)
    with Controls() as controls:
        code, progress = run(tiny(), tmp_path, controls)
    assert (code, progress.step) == (143, 3)


def test_a_request_to_save_does_not_end_the_run(
    tiny: Make, tmp_path: Path, calls: list[str]
) -> None:
    code, _ = run(tiny("train.steps=4"), tmp_path, Asking({3: Pending(save=True)}))
    assert code == 0
    assert [call for call in calls if "save" in call] == [
        "off: Trainer.save 2",
        "off: Trainer.save 4",
    ]


def test_a_race_ends_at_the_target_and_saves_there(
    tiny: Make, tmp_path: Path, calls: list[str]
) -> None:
    config = tiny("train.stop=target", "train.target=5.94", "validation.every=1")
    code, progress = run(config, tmp_path)
    assert code == 0
    assert progress.step < 8
    assert calls[-1] == f"off: Trainer.save {progress.step}"


def test_a_finished_trainer_does_nothing(tiny: Make, tmp_path: Path, calls: list[str]) -> None:
    config = tiny()
    done = Progress(step=8, batch=8, val_step=8, val_loss=1.0)
    trainer = Trainer(config, ALONE, Path(config.data.dir), done)
    with trainer.loader, closing(writer_into(tmp_path)) as writer:
        assert train(trainer, quiet_log(config), writer, Asking({})) == 0
    assert calls == []
