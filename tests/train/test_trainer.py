"""The verbs of a Trainer, one at a time: step, validate, save, restore, rewind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speedrun import limits
from speedrun.config.schedule import settings_at
from speedrun.config.schema import Config
from speedrun.data.loader import Batch
from speedrun.errors import RunError
from speedrun.model.loss import Loss
from speedrun.train import checkpoint
from speedrun.train.outcomes import NONFINITE_STEPS
from speedrun.train.progress import Progress
from speedrun.train.signals import Pending
from speedrun.train.trainer import Trainer
from tests.train.heard import ALONE, Make, newest, quiet_log, same_bits, step, writer_into

# Record 18 and its successors need four layers, for halves that mirror each other.
SIZES = ("model.layers=4", "batch.length=512", "batch.tokens=512", "validation.tokens=512")


@contextmanager
def trainer_of(config: Config, progress: Progress | None = None) -> Iterator[Trainer]:
    trainer = Trainer(config, ALONE, Path(config.data.dir), progress)
    with trainer.loader:
        yield trainer


def state(trainer: Trainer) -> dict[str, Tensor]:
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    return weights | trainer.optimizer.export_state()


def spoil(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, batches: set[int]) -> None:
    """Losses of these batches are NaN."""
    honest = trainer.training_loss

    def spoilt(batch: Batch) -> Tensor:
        return honest(batch) * (math.nan if trainer.progress.batch in batches else 1.0)

    monkeypatch.setattr(trainer, "training_loss", spoilt)


class Events:
    """A log's sink that remembers."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def log(self, kind: str, **values: Any) -> None:
        self.seen.append((kind, values))


def test_the_first_step_moves_the_head_and_counts(tiny: Make) -> None:
    with trainer_of(tiny()) as trainer:
        before = state(trainer)
        outcome = step(trainer)
        after = state(trainer)
    # The head starts at zero, so the first gradient reaches it and nothing else.
    assert not torch.equal(before["head.weight"], after["head.weight"])
    assert (trainer.progress.step, trainer.progress.batch) == (1, 1)
    assert outcome.finite
    assert outcome.loss == pytest.approx(math.log(384), abs=1e-5)
    assert trainer.progress.recent == [outcome.loss]
    assert outcome.settings == settings_at(trainer.config, 0)
    assert (outcome.save, outcome.must_rewind) == (False, False)
    assert outcome.exit_code is None
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.parametrize("threads", [0, 1])
def test_cores_that_the_shell_leaves_idle_are_named(
    tiny: Make, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(limits, "cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with trainer_of(tiny(f"machine.threads={threads}")) as trainer:
        named = "OMP_NUM_THREADS=1: 1 of 8 cores work; unset it or set machine.threads"
        assert (named in trainer.notes) == (threads == 0)


def test_a_step_uses_the_settings_of_its_own_number(tiny: Make) -> None:
    config = tiny("schedule.warmup=4", "schedule.steps=8", "schedule.cooldown=4")
    with trainer_of(config) as trainer:
        rates = []
        for _ in range(8):
            step(trainer)
            rates += [group["lr"] / group["initial_lr"] for group in trainer.optimizer.param_groups]
    groups = len(trainer.optimizer.param_groups)
    wanted = [settings_at(config, step).learning_rate_multiplier for step in range(8)]
    assert rates == pytest.approx([rate for rate in wanted for _ in range(groups)])
    assert len(set(wanted)) > 3


@pytest.mark.parametrize("passes", [2, 4])
def test_gradients_do_not_depend_on_microbatches(tiny: Make, passes: int) -> None:
    gradients = []
    for microbatch in (4, 4 // passes):
        with trainer_of(tiny(f"machine.microbatch={microbatch}")) as trainer:
            torch.nn.init.normal_(trainer.model.head.weight, std=0.1)  # type: ignore[union-attr]
            trainer.forward_backward(next(trainer.loader))
            assert trainer.microbatches == 4 // microbatch
        named = trainer.model.named_parameters()
        gradients.append({name: p.grad for name, p in named if p.grad is not None})
    for name, whole in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], whole, rtol=1e-4, atol=1e-7)


def test_a_step_that_is_not_finite_changes_nothing_but_the_counts(
    tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainer_of(tiny("optimizer.kind=muon")) as trainer:
        step(trainer)
        before = state(trainer)
        spoil(trainer, monkeypatch, {1})
        outcome = step(trainer)
        assert same_bits(before, state(trainer))
        assert not outcome.finite
        assert math.isnan(outcome.loss)
        assert (trainer.progress.step, trainer.progress.nonfinite) == (2, 1)
        assert len(trainer.progress.recent) == 1
        assert step(trainer).finite
        assert trainer.progress.nonfinite == 0
        assert not same_bits(before, state(trainer))


def test_gradients_above_the_limit_are_scaled_to_it(
    tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainer_of(tiny("optimizer.clip=0.001")) as trainer:
        norm = 0.0
        update = trainer.optimizer.step

        def spied() -> None:
            nonlocal norm
            found = [p.grad for p in trainer.model.parameters() if p.grad is not None]
            norm = float(torch.stack([grad.norm() for grad in found]).norm())
            update()

        monkeypatch.setattr(trainer.optimizer, "step", spied)
        outcome = step(trainer)
    assert outcome.grad_norm > 0.01
    assert norm == pytest.approx(0.001, rel=1e-4)


@pytest.mark.parametrize(
    ("pending", "save", "code"),
    [
        (Pending(), False, None),
        (Pending(save=True), True, None),
        (Pending(interrupt=True), True, 130),
        (Pending(terminate=True), True, 143),
        (Pending(out_of_time=True), True, 124),
    ],
)
def test_what_was_asked_for_comes_back_with_the_step(
    tiny: Make, pending: Pending, save: bool, code: int | None
) -> None:
    with trainer_of(tiny()) as trainer:
        outcome = step(trainer, lambda: pending)
    assert (outcome.save, outcome.exit_code) == (save, code)
    assert trainer.progress.step == 1  # the step is done all the same


def test_training_and_validation_have_losses_of_their_own(
    tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainer_of(tiny()) as trainer:
        honest = trainer.validate().loss
        plain = Loss.training_loss
        monkeypatch.setattr(Loss, "training_loss", lambda *inputs: 2 * plain(*inputs))
        assert step(trainer).loss == pytest.approx(2 * honest, rel=1e-4)
        assert trainer.validate().loss < 1.1 * honest
        assert step(trainer).loss > 1.5 * honest  # back to training after a validation


def test_validation_sees_further_than_training_if_told_to(
    tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("batch.length=512", "batch.tokens=1024", "validation.tokens=1024",
             "attention.window=blocks", "attention.window_start=128", "attention.window_end=128",
             "validation.window=384")  # fmt: skip
    with trainer_of(tiny(*words)) as trainer:
        seen: list[int] = []
        for name in ("training_loss", "validation_loss"):
            honest = getattr(trainer, name)

            def watched(batch: Batch, honest: Any = honest) -> Tensor:
                assert trainer.planner.window is not None
                seen.append(int(trainer.planner.window))
                loss: Tensor = honest(batch)
                return loss

            monkeypatch.setattr(trainer, name, watched)
        step(trainer)
        trainer.validate()
        step(trainer)
    assert (seen[0], set(seen[1:-1]), seen[-1]) == (1, {3}, 1)


def test_validation_touches_no_weight_and_counts_the_target(tiny: Make) -> None:
    with trainer_of(tiny("train.target=5.9", "train.stop=target")) as trainer:
        before = state(trainer)
        first, second = trainer.validate(), trainer.validate()
        assert first == second
        assert same_bits(before, state(trainer))
        assert trainer.progress.val_loss == first.loss
        assert (trainer.progress.crossed, trainer.finished) == (None, False)
        while trainer.progress.val_loss > 5.9:
            step(trainer)
            trainer.validate()
        crossed = trainer.progress.crossed
        assert crossed is not None
        assert trainer.progress.step - 1 < crossed.steps <= trainer.progress.step
        assert (crossed.cell, trainer.progress.first_below) == (1, trainer.progress.step)
        assert trainer.finished
        assert trainer.progress.step < trainer.config.steps


def test_when_validation_is_due(tiny: Make) -> None:
    config = tiny("validation.every=3")
    with trainer_of(config) as trainer:
        due = []
        for trainer.progress.step in range(1, 9):
            if trainer.validation_due:
                due.append(trainer.progress.step)
    assert due == [3, 6, 8]


@pytest.mark.parametrize("recipe", ["modern", "record-03", "record-18", "best"])
def test_a_restored_trainer_goes_on_bit_for_bit(tiny: Make, tmp_path: Path, recipe: str) -> None:
    config = tiny(*SIZES, recipe=recipe)
    with trainer_of(config) as trainer, closing(writer_into(tmp_path)) as writer:
        for _ in range(3):
            step(trainer)
        trainer.save(writer)
        writer.finish()
        saved = state(trainer)
        losses = [step(trainer).loss for _ in range(3)]
        ended = state(trainer)
    found = newest(tmp_path)
    progress = Progress(**found.meta["progress"])
    assert (progress.step, progress.batch) == (3, 3)
    with trainer_of(config, progress) as again:
        assert not same_bits(saved, state(again))
        again.restore(found)
        assert same_bits(saved, state(again))
        assert [step(again).loss for _ in range(3)] == losses
        assert same_bits(ended, state(again))


def test_a_checkpoint_of_another_model_is_one_sentence(tiny: Make, tmp_path: Path) -> None:
    with trainer_of(tiny()) as trainer, closing(writer_into(tmp_path)) as writer:
        trainer.save(writer)
    found = newest(tmp_path)
    with (
        trainer_of(tiny("model.width=64")) as other,
        pytest.raises(RunError, match=r"does not fit this model: .*size mismatch") as caught,
    ):
        other.restore(found)
    assert "\n" not in str(caught.value)


def test_a_rewind_restores_the_weights_and_goes_on_with_the_data(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, events = tiny(), Events()
    log = quiet_log(config, events)
    with trainer_of(config) as trainer, closing(writer_into(tmp_path)) as writer:
        step(trainer)
        step(trainer)
        trainer.save(writer)
        saved = state(trainer)
        step(trainer)
        spoil(trainer, monkeypatch, {3, 4, 5})
        outcomes = [step(trainer) for _ in range(NONFINITE_STEPS)]
        trainer.save(writer)  # while the run is not well: nothing to go back to
        assert [outcome.must_rewind for outcome in outcomes] == [False, False, True]
        trainer.rewind(writer, log)
        assert same_bits(saved, state(trainer))
        assert (trainer.progress.step, trainer.progress.batch) == (2, 6)
        assert (trainer.progress.nonfinite, trainer.progress.rewinds) == (0, 1)
        assert checkpoint.folders(tmp_path) == [tmp_path / "step-000002"]
        assert step(trainer).finite
    assert events.seen == [("rewind", {"step": 2, "from_step": 6, "batch": 6})]


def test_a_rewind_without_a_checkpoint_gives_up_with_a_report(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, events = tiny(), Events()
    with trainer_of(config) as trainer, closing(writer_into(tmp_path)) as writer:
        spoil(trainer, monkeypatch, {0, 1, 2})
        for _ in range(NONFINITE_STEPS):
            step(trainer)
        with pytest.raises(RunError, match=r"no checkpoint to go back to.*--checkpoint-every"):
            trainer.rewind(writer, quiet_log(config, events))
    assert [kind for kind, _ in events.seen] == ["gave_up"]


@pytest.mark.parametrize(("jobs", "threads"), [(1, 6), (2, 3), (7, 1)])
def test_runs_that_share_the_machine_share_its_cores(
    tiny: Make, monkeypatch: pytest.MonkeyPatch, jobs: int, threads: int
) -> None:
    monkeypatch.setattr("speedrun.limits.cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        with trainer_of(tiny("machine.threads=0", f"machine.jobs={jobs}")):
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
