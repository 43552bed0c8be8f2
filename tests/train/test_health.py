"""Health and honesty: what is not finite, spikes, rewinds, giving up; the clock and the log."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from speedrun.commands.train import print_result
from speedrun.data.loader import Batch
from speedrun.errors import RunError
from speedrun.train import checkpoint, log
from speedrun.train.clock import Clock
from speedrun.train.health import SPIKE_LEAST, SPIKE_WINDOW, Agreement, spike
from speedrun.train.outcomes import NONFINITE_STEPS
from speedrun.train.progress import Progress
from speedrun.train.request import Interval
from speedrun.train.run import RunFolder
from speedrun.train.signals import Pending
from speedrun.train.trainer import REWINDS, Trainer
from speedrun.train.validate import Validation, validate
from tests.train.heard import ALONE, Heard, Make, losses, newest, same_bits, tensors, train, values

Spoil = Callable[..., None]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """Multiply the losses of these batches, by NaN unless told."""

    def install(batches: Collection[int], factor: float = math.nan) -> None:
        honest = Trainer.training_loss

        def spoilt(self: Trainer, batch: Batch) -> Tensor:
            return honest(self, batch) * (factor if self.loader.position - 1 in batches else 1.0)

        monkeypatch.setattr(Trainer, "training_loss", spoilt)

    return install


def test_a_spike_is_far_above_the_recent_losses() -> None:
    recent = [4.0 + 0.01 * (index % 3) for index in range(SPIKE_LEAST - 1)]
    assert spike(recent, 400.0) is None  # too few to say
    recent.append(4.0)
    assert spike(recent, 4.02) is None
    assert spike(recent, 3.0) is None  # below is no spike
    z = spike(recent, 5.0)
    assert z is not None
    assert z > 50


def test_only_finite_losses_enter_the_window() -> None:
    progress = Progress(recent=[4.0, 4.1] * SPIKE_LEAST)
    for bad in (math.nan, math.inf, -math.inf):
        before = list(progress.recent)
        assert progress.count_loss(Agreement(bad, 1.0, False, Pending())) is None
        assert progress.recent == before
    for index in range(200):
        progress.count_loss(Agreement(4.0 + 0.01 * (index % 7), 1.0, True, Pending()))
    assert len(progress.recent) == SPIKE_WINDOW
    assert progress.count_loss(Agreement(9.0, 1.0, True, Pending())) is not None


def test_a_spike_in_a_run_is_flagged_and_a_nan_before_it_hides_nothing(
    tiny: Make, tmp_path: Path, spoil: Spoil
) -> None:
    spoil({26})
    spoil({29}, 30.0)
    heard = Heard()
    train(tiny("train.steps=32", "optimizer.muon.lr=1e-4", "optimizer.head.lr=1e-4",
             "optimizer.embedding.lr=1e-4"), tmp_path / "run", heard)  # fmt: skip
    assert values(tmp_path / "run", "nonfinite") == [27]
    assert values(tmp_path / "run", "spike") == [30]
    assert any("step 27: loss or gradient is not finite" in line for line in heard.lines)
    assert any("step 30: loss" in line and "is a spike" in line for line in heard.lines)
    recent = newest(tmp_path / "run/checkpoints").meta["progress"]["recent"]
    assert all(math.isfinite(loss) for loss in recent)


@pytest.mark.parametrize(("every", "keep"), [(2, 2), (1, 1)])
def test_non_finite_steps_in_a_row_rewind_and_pass_over_the_data(
    tiny: Make, tmp_path: Path, spoil: Spoil, every: int, keep: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Checkpoints saved while ill are not gone back to, and push no good one out."""
    config = tiny("validation.every=100")
    spoil({4, 5, 6})
    heard = Heard()
    how: dict[str, Any] = {"checkpoint_every": Interval(steps=every), "keep": keep}
    summary = train(config, tmp_path / "run", heard, **how)
    assert (summary.steps, summary.rewinds) == (8, 1)
    folder = RunFolder(tmp_path / "run")
    assert values(folder.path, "nonfinite", "batch") == [4, 5, 6]
    (rewind,) = folder.read_metrics("rewind")
    assert (rewind["step"], rewind["from_step"], rewind["batch"]) == (4, 7, 7)
    assert values(folder.path, "train") == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8]
    assert any("back to the checkpoint of step 4" in line for line in heard.lines)
    # What followed is what the weights of step 4 make of batch 7.
    monkeypatch.undo()
    train(config, tmp_path / "well", **how | {"keep": 9})
    trainer = Trainer(config, ALONE, Path(config.data.dir), Progress(step=4, batch=7))
    with trainer.loader:
        trainer.restore(checkpoint.read(tmp_path / "well/checkpoints/step-000004"))
        trainer.apply_settings()
        expected = trainer.forward_backward(next(trainer.loader)).item()
    assert folder.read_metrics("train")[7]["loss"] == expected


def test_a_rewound_run_resumes_exactly(tiny: Make, tmp_path: Path, spoil: Spoil) -> None:
    config = tiny("train.steps=12")
    spoil({4, 5, 6})
    how: dict[str, Any] = {"checkpoint_every": Interval(steps=2)}
    train(config, tmp_path / "whole", **how)
    for name, after in (("early", 6), ("late", 10)):  # before and after the rewind
        train(config, tmp_path / name, Heard(after=after), **how)
        train(config, tmp_path / name, resume=True, **how)
        for kind in ("train", "val", "rewind"):
            key = "step" if kind == "rewind" else "loss"
            assert values(tmp_path / name, kind, key) == values(tmp_path / "whole", kind, key)


def test_too_many_rewinds_end_in_a_report(tiny: Make, tmp_path: Path, spoil: Spoil) -> None:
    spoil(range(4, 100))
    with pytest.raises(RunError) as caught:
        train(tiny(), tmp_path / "run", checkpoint_every=Interval(steps=2))
    report = str(caught.value)
    assert f"not finite in {NONFINITE_STEPS} steps in a row, the last at step 7" in report
    assert f"after {REWINDS} rewinds already" in report
    assert str(tmp_path / "run/checkpoints/step-000004") in report
    assert len(values(tmp_path / "run", "rewind")) == REWINDS
    assert values(tmp_path / "run", "gave_up", "reason") == [report]
    assert newest(tmp_path / "run/checkpoints").step == 4


def test_a_run_that_compiles_nothing_does_not_warm_up(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Trainer, "warm_up")
    train(tiny("train.steps=1"), tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 1


def test_warm_up_leaves_no_trace(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "needs_warm_up", True)
    for name, warmup in (("with", True), ("without", False)):
        train(tiny(), tmp_path / name, warm_up=warmup)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert newest(tmp_path / "with/checkpoints").step == 8
    assert same_bits(tensors(tmp_path / "with"), tensors(tmp_path / "without"))


COUNTING = """
import torch
from speedrun.model.block import MLP


class Counting(MLP):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x, norm):
        if self.training:
            self.passes += 1
        return super().forward(x, norm) * (1 + 0.01 * self.passes)
"""


def test_nor_does_it_in_a_buffer_that_changes_in_a_forward_pass(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "needs_warm_up", True)
    (tmp_path / "mine.py").write_text(COUNTING)
    own = f"custom.mlp.use={tmp_path / 'mine.py'}:Counting"
    for name, warmup in (("with", True), ("without", False)):
        train(tiny(own, "train.steps=3"), tmp_path / name, warm_up=warmup)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert same_bits(tensors(tmp_path / "with"), tensors(tmp_path / "without"))


def test_the_clock_stands_still_while_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr("speedrun.train.clock.time.perf_counter", lambda: now)
    clock = Clock(torch.device("cpu"), seconds=100.0)
    clock.start()
    now = 6.0
    assert clock.seconds == 101.0
    with clock.paused():
        now = 9.0
        assert clock.seconds == 101.0
    assert clock.seconds == 101.0
    now = 11.0
    assert clock.seconds == 103.0


def test_every_step_is_timed_and_validation_and_checkpoints_are_not(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on only where this test says so."""
    now = 10.0  # since the process began

    def pass_by(seconds: float) -> None:
        nonlocal now
        now += seconds

    def slow_validation(*arguments: Any) -> Validation:
        pass_by(0.5)
        return validate(*arguments)

    def slow_export(self: Any) -> dict[str, Tensor]:
        pass_by(0.5)
        return export(self)

    honest = Trainer.training_loss

    def slow_first(self: Trainer, batch: Batch) -> Tensor:
        pass_by(1.5 if self.loader.position == 1 else 1.0)
        return honest(self, batch)

    from speedrun.optim import CombinedOptimizer

    export = CombinedOptimizer.export_state
    monkeypatch.setattr(CombinedOptimizer, "export_state", slow_export)
    monkeypatch.setattr("speedrun.train.trainer.validate", slow_validation)
    monkeypatch.setattr(Trainer, "training_loss", slow_first)
    monkeypatch.setattr(Clock, "_now", lambda _: now)
    monkeypatch.setattr(Clock, "wall", staticmethod(lambda: now))
    config = tiny("machine.microbatch=4")
    summary = train(config, tmp_path / "run", checkpoint_every=Interval(steps=4))
    rows = RunFolder(tmp_path / "run").read_metrics("train")
    assert [row["ms"] for row in rows] == [1500.0] + [1000.0] * 7
    assert rows[-1]["seconds"] == summary.train_seconds == 8.5
    # Three validations and two checkpoints.
    assert summary.wall_seconds == 10.0 + 8.5 + 5 * 0.5
    assert all(row["wall_seconds"] > row["seconds"] for row in rows)


def no_constants(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


def test_records_are_strict_json_whatever_happens(
    tiny: Make, tmp_path: Path, spoil: Spoil, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil({2, 5}, math.inf)
    summary = train(tiny(), tmp_path / "run")
    print_result(tiny(), RunFolder(tmp_path / "run"), summary)
    assert "training time" in capsys.readouterr().out
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=no_constants) for line in lines]
    assert {row["kind"] for row in rows} >= {"start", "train", "val", "nonfinite", "checkpoint"}
    assert [row["loss"] for row in rows if row["kind"] == "train"].count(None) == 2
    json.loads((tmp_path / "run/summary.json").read_text(), parse_constant=no_constants)


def test_the_verdict_names_what_is_off() -> None:
    progress = Progress(recent=[3.0, 3.1])
    assert log._verdict(progress, 3.0, 0.0, 0.5) == ""
    assert log._verdict(progress, 3.0, 0.2, 0.5) == "data-bound"
    assert log._verdict(progress, 4.5, 0.0, 0.5) == "diverging"
    assert log._verdict(progress, math.nan, 0.0, 0.5) == "diverging"
    assert log._verdict(progress, 3.0, 0.0, 0.01) == "memory nearly full"
