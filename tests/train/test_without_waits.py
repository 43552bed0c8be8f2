"""Steps that nobody waits for, as on a GPU: what they come to is read while the next one is made.

Here on a CPU, where they could be waited for: a whole run must come to the same bits either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speedrun.config.schema import Config
from speedrun.data.loader import Batch
from speedrun.model import native
from speedrun.model.linear import Norm
from speedrun.train.loop import train as train_loop
from speedrun.train.request import Interval
from speedrun.train.run import RunFolder
from speedrun.train.signals import Controls, Pending
from speedrun.train.trainer import Trainer
from tests.train import jobs
from tests.train.children import on_ranks
from tests.train.heard import (
    ALONE,
    Heard,
    Make,
    losses,
    quiet_log,
    same_bits,
    tensors,
    train,
    values,
    writer_into,
)
from tests.train.jobs import no_waiting
from tests.train.waits import NoWaits, WaitedError

RECIPES = ["baseline", "record-03", "record-18", "best"]
SIZES = ("model.layers=4", "batch.length=256", "batch.tokens=512", "validation.tokens=512")
HOW = ["item", "float", "bool", "tolist", "nonzero", "cpu", "numpy", "tensor", "place"]
KINDS = ("train", "val", "nonfinite", "spike", "rewind", "checkpoint")


@contextmanager
def spoilt(batches: Collection[int]) -> Iterator[None]:
    """The losses of these batches are NaN."""
    honest = Trainer.training_loss

    def loss(self: Trainer, batch: Batch) -> Tensor:
        return honest(self, batch) * (math.nan if self.loader.position - 1 in batches else 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "training_loss", loss)
        yield


def told(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """What a run says, but for its times."""
    keys = ("step", "loss", "grad_norm", "batch", "from_step", "tokens")
    run = RunFolder(folder)
    return {
        kind: [tuple(row.get(key) for key in keys) for row in run.read_metrics(kind)]
        for kind in KINDS
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_whole_run_comes_to_the_same_bits(recipe: str, tiny: Make, tmp_path: Path) -> None:
    """Steps that are left out and a limit on the gradients among them."""
    config = tiny(*SIZES, "train.steps=12", "optimizer.clip=0.7", recipe=recipe)
    how: dict[str, Any] = {"checkpoint_every": Interval(steps=5), "keep": 9}
    with spoilt({0, 3, 6, 7}):
        train(config, tmp_path / "waited", **how)
        with no_waiting():
            train(config, tmp_path / "whole", **how)
            train(config, tmp_path / "cut", Heard(at_step=7), **how)
            train(config, tmp_path / "cut", resume=True, **how)
    for name in ("whole", "cut"):
        assert losses(tmp_path / name) == losses(tmp_path / "waited")
        assert same_bits(tensors(tmp_path / name), tensors(tmp_path / "waited"))
    assert told(tmp_path / "whole") == told(tmp_path / "waited")
    assert values(tmp_path / "whole", "nonfinite") == [1, 4, 7, 8]
    assert values(tmp_path / "whole", "checkpoint") == [5, 10, 12]


def test_a_rewind_comes_a_step_later_and_goes_back_as_far(tiny: Make, tmp_path: Path) -> None:
    config = tiny("validation.every=100", "train.steps=10")
    with spoilt({4, 5, 6}), no_waiting():
        summary = train(config, tmp_path / "run", checkpoint_every=Interval(steps=4))
    assert (summary.steps, summary.rewinds) == (10, 1)
    (rewind,) = RunFolder(tmp_path / "run").read_metrics("rewind")
    assert (rewind["step"], rewind["from_step"], rewind["batch"]) == (4, 8, 8)
    assert values(tmp_path / "run", "nonfinite", "batch") == [4, 5, 6]
    # The step that was under way, and is undone, is not told.
    assert values(tmp_path / "run", "train") == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_come_to_one_mind_a_step_later(rank: int, tiny: Make, tmp_path: Path) -> None:
    """NaNs on one of them, a rewind in which a stop was asked for, and going on from there."""
    config = tiny("validation.every=6", "train.steps=10")
    how = {"checkpoint_every": Interval(steps=4)}
    on_ranks(2, jobs.train_and_meet, tmp_path, config, tmp_path / "run", rank, {5, 6, 7}, 7, how)
    run = RunFolder(tmp_path / "run")
    assert values(run.path, "nonfinite", "batch") == [4, 5, 6]
    (rewind,) = run.read_metrics("rewind")
    assert (rewind["step"], rewind["from_step"], rewind["batch"]) == (4, 8, 8)
    assert values(run.path, "val") == [0, 6], "no validation of weights that are left"
    assert run.read_metrics("end")[-1]["code"] == 143, "heard in the step that was undone"
    on_ranks(2, jobs.train, tmp_path, config, run.path, {**how, "resume": True})
    assert values(run.path, "train")[-6:] == [5, 6, 7, 8, 9, 10]
    assert values(run.path, "val")[-2:] == [6, 10]


class Asking(Controls):
    """As if a signal came before the backward of this step was done."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._at, self._looks = step, 0

    def pending(self) -> Pending:
        self._looks += 1
        # It is asked once more after the validation of step 0, which follows step 1.
        return Pending(terminate=self._looks == self._at + 1)


def test_a_stop_is_heard_a_step_later(tiny: Make, tmp_path: Path) -> None:
    config = tiny("validation.every=100")
    with no_waiting():
        trainer = Trainer(config, ALONE, Path(config.data.dir))
    with trainer.loader, closing(writer_into(tmp_path)) as writer:
        assert train_loop(trainer, quiet_log(config), writer, Asking(3)) == 143
    assert trainer.progress.step == 4
    assert (tmp_path / "step-000004").is_dir()


@contextmanager
def trainer_of(config: Config) -> Iterator[Trainer]:
    with no_waiting():
        trainer = Trainer(config, ALONE, Path(config.data.dir))
    with trainer.loader:
        yield trainer


@pytest.fixture
def torch_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernels of a CPU, which a GPU has not either."""
    monkeypatch.setenv(native.SWITCH, "0")
    native.load.cache_clear()
    yield
    native.load.cache_clear()


@pytest.mark.usefixtures("torch_code")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_asks_the_device_for_nothing(recipe: str, tiny: Make) -> None:
    config = tiny(*SIZES, "optimizer.clip=0.7", "machine.microbatch=1", "machine.attention=dense",
                  recipe=recipe)  # fmt: skip
    with trainer_of(config) as trainer:
        trainer.step()
        with NoWaits() as watched:
            for _ in range(3):
                trainer.step()
        assert watched.operations > 1000
        assert [outcome.step for outcome in trainer.outcomes()] == [1, 2, 3]
        assert [outcome.step for outcome in trainer.outcomes(everything=True)] == [4]


@pytest.mark.parametrize("how", HOW)
def test_what_asks_for_a_number_is_found(
    how: str, tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way of asking, in the middle of the model."""
    ask: dict[str, Callable[[Tensor], Any]] = {
        "item": lambda x: x.sum().item(),
        "float": lambda x: float(x.sum()),
        "bool": lambda x: bool(x.sum() > 1e9),
        "tolist": lambda x: x.flatten()[:2].tolist(),
        "nonzero": lambda x: x.nonzero(),
        "cpu": lambda x: x.to("cpu"),
        "numpy": lambda x: x.detach().numpy(),
        "tensor": lambda x: torch.tensor([1.0, 2.0], device=x.device),
        "place": lambda x: x.detach().clone().flatten()[:2].__setitem__(0, 1.0),
    }
    honest = Norm.forward

    def asking(self: Norm, x: Tensor) -> Tensor:
        ask[how](x)
        return honest(self, x)

    with trainer_of(tiny()) as trainer:
        trainer.step()
        monkeypatch.setattr(Norm, "forward", asking)
        with NoWaits(), pytest.raises(WaitedError, match="test_without_waits"):
            trainer.step()


def test_who_waits_asks_once_a_step(tiny: Make) -> None:
    """As with somebody else's optimizer on a GPU, and here otherwise."""
    config = tiny()
    trainer = Trainer(config, ALONE, Path(config.data.dir))
    with trainer.loader, pytest.raises(WaitedError, match="read"), NoWaits():
        trainer.step()
    assert trainer.waits
    assert torch.get_default_device().type == "cpu"
