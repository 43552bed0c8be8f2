"""TensorBoard's own writer, read back by its own reader; and loggers that fail at any time."""

from __future__ import annotations

import errno
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from speedrun.config.resolve import to_toml
from speedrun.data.loader import Batch
from speedrun.errors import ConfigError, RunError
from speedrun.train import sinks
from speedrun.train.request import Interval
from speedrun.train.run import RunFolder
from speedrun.train.trainer import Trainer
from tests.train import jobs
from tests.train.children import on_ranks
from tests.train.heard import Heard, Make, losses, train
from tests.train.test_guard import ERRORS
from tests.waiting import wait_for

BOARD: dict[str, Any] = {"log": ("tensorboard",)}
EACH_ERROR = pytest.mark.parametrize(
    ("error", "words"), ERRORS, ids=[type(error).__name__ for error, _ in ERRORS]
)


@pytest.fixture(autouse=True)
def _tensorboard() -> None:
    pytest.importorskip("tensorboard", reason="NOT TESTED: tensorboard is not installed")


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, BaseException], None]:
    """Make a verb of the real writer raise."""
    from torch.utils.tensorboard import SummaryWriter

    def spoil(verb: str, error: BaseException) -> None:
        def spoilt(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(SummaryWriter, verb, spoilt)

    return spoil


class Board:
    """What TensorBoard shows of a run."""

    def __init__(self, folder: Path) -> None:
        module = import_module("tensorboard.backend.event_processing.event_accumulator")
        everything = {"scalars": 0, "tensors": 0}
        self._read = module.EventAccumulator(str(folder / "tensorboard"), everything)
        self._read.Reload()

    def curve(self, name: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in self._read.Scalars(name)]

    def texts(self, name: str) -> list[tuple[int, str]]:
        """With their steps; a block of code without its margin."""
        found = []
        for point in self._read.Tensors(f"{name}/text_summary"):
            (text,) = point.tensor_proto.string_val
            lines = [line.removeprefix("    ") for line in text.decode().splitlines()]
            found.append((point.step, "\n".join(lines)))
        return found

    def assert_shows(self, folder: Path) -> None:
        """Every number of the run's own records of curves, and no more points than those."""
        for kind in ("train", "val"):
            rows = RunFolder(folder).read_metrics(kind)
            for key in rows[-1].keys() - {"kind", "step"}:
                expected = [(r["step"], r[key]) for r in rows if isinstance(r[key], int | float)]
                shown = self.curve(f"{kind}/{key}")
                assert [step for step, _ in shown] == [step for step, _ in expected]
                numbers = np.array([value for _, value in expected], dtype=np.float32)
                assert [value for _, value in shown] == numbers.tolist()


def writers_at_work() -> int:
    """Threads of TensorBoard's writers that nobody has closed."""
    return sum(type(thread).__name__ == "_AsyncWriterThread" for thread in threading.enumerate())


def die() -> None:
    raise RuntimeError("died")


def test_tensorboard_shows_what_the_run_recorded(tiny: Make, tmp_path: Path) -> None:
    before = writers_at_work()
    summary = train(tiny(), tmp_path, **BOARD)
    assert writers_at_work() == before
    board = Board(tmp_path)
    board.assert_shows(tmp_path)
    assert [step for step, _ in board.curve("train/loss")] == [*range(1, 9)]
    assert [step for step, _ in board.curve("val/loss")] == [0, 4, 8]
    assert board.texts("config") == [(0, to_toml(tiny()).rstrip("\n"))]
    ((step, text),) = board.texts("summary")
    assert step == 8
    assert f'"val_loss": {summary.val_loss}' in text


def test_a_resumed_run_shows_no_step_twice(tiny: Make, tmp_path: Path) -> None:
    """It dies after step 7, goes on from step 4, is stopped, and goes on once more."""
    config, before = tiny("train.steps=12"), writers_at_work()
    with pytest.raises(RuntimeError, match="died"):
        train(config, tmp_path, Heard(at={7: die}), checkpoint_every=Interval(steps=4), **BOARD)
    assert writers_at_work() == before
    assert [step for step, _ in Board(tmp_path).curve("train/loss")] == [*range(1, 8)]
    train(config, tmp_path, Heard(9), resume=True, **BOARD)
    train(config, tmp_path, resume=True, **BOARD)
    assert writers_at_work() == before
    board = Board(tmp_path)
    board.assert_shows(tmp_path)
    assert [step for step, _ in board.curve("train/loss")] == [*range(1, 13)]
    assert [step for step, _ in board.texts("config")] == [0, 4, 10]


def test_an_attempt_that_left_no_checkpoint_is_not_shown(tiny: Make, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="died"):
        train(tiny(), tmp_path, Heard(at={3: die}), **BOARD)
    (tmp_path / "config.toml").unlink()
    train(tiny(), tmp_path, **BOARD)
    Board(tmp_path).assert_shows(tmp_path)


def spoil_batches(monkeypatch: pytest.MonkeyPatch, batches: set[int]) -> None:
    honest = Trainer.training_loss

    def spoilt(self: Trainer, batch: Batch) -> Tensor:
        return honest(self, batch) * (math.nan if self.loader.position - 1 in batches else 1.0)

    monkeypatch.setattr(Trainer, "training_loss", spoilt)


def test_a_rewind_hides_the_steps_it_undoes_and_is_told(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_batches(monkeypatch, {1, 4, 5, 6})
    train(tiny(), tmp_path, checkpoint_every=Interval(steps=2), **BOARD)
    board = Board(tmp_path)
    steps, shown = zip(*board.curve("train/loss"), strict=True)
    assert steps == tuple(range(1, 9))
    assert [math.isnan(loss) for loss in shown] == [step == 2 for step in steps]
    # The records keep the steps that were undone as well.
    kept = [row["loss"] for row in RunFolder(tmp_path).read_metrics("train")]
    assert kept[7:] == pytest.approx(shown[4:], rel=1e-6)
    *left_out, back = board.texts("events")
    assert [step for step, _ in left_out] == [2, 5, 6, 7]
    assert all("not finite" in text for _, text in left_out)
    assert back[0] == 4
    assert "back to the checkpoint of step 4" in back[1]


def test_of_several_ranks_the_first_logs(tiny: Make, tmp_path: Path) -> None:
    on_ranks(2, jobs.train, tmp_path, tiny("train.steps=2"), tmp_path / "run", BOARD)
    assert len([*(tmp_path / "run/tensorboard").iterdir()]) == 1
    Board(tmp_path / "run").assert_shows(tmp_path / "run")


# Failing, in the real writer.


@EACH_ERROR
@pytest.mark.parametrize(
    ("verb", "what"), [("__init__", "opened"), ("add_scalar", "written"), ("close", "closed")]
)
def test_a_run_goes_on_whatever_the_writer_raises(
    tiny: Make, tmp_path: Path, writer: Callable[[str, BaseException], None],
    verb: str, what: str, error: BaseException, words: str,
) -> None:  # fmt: skip
    writer(verb, error)
    heard, config = Heard(), tiny("train.steps=4")
    assert train(config, tmp_path, heard, **BOARD).steps == 4
    (told,) = [line for line in heard.lines if line.startswith("tensorboard cannot be")]
    assert told.startswith(f"tensorboard cannot be {what}: {words}; ")
    assert len(losses(tmp_path)) == 4
    assert RunFolder(tmp_path).read_summary() is not None


def test_a_folder_that_cannot_be_written_is_a_note(tiny: Make, tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    heard = Heard()
    assert train(tiny("train.steps=2"), tmp_path, heard, **BOARD).steps == 2
    words = "cannot be opened: FileExistsError: File exists; the run goes on without it"
    assert f"tensorboard {words}" in heard.lines


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_goes_on_after_a_disk_that_was_full(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = import_module("tensorboard.summary.writer.record_writer").RecordWriter
    honest, full = records.write, False

    def write(self: Any, data: bytes) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        honest(self, data)

    def fill(now: bool) -> Callable[[], None]:
        def change() -> None:
            nonlocal full
            full = now

        return change

    monkeypatch.setattr(records, "write", write)
    run = RunFolder(tmp_path)
    written = partial(wait_for, lambda: bool(run.read_metrics("checkpoint")), "a checkpoint")
    heard = Heard(at={3: fill(True), 5: fill(False), 8: written})
    every = Interval(steps=6)
    train(tiny("train.steps=12"), tmp_path, heard, checkpoint_every=every, **BOARD)
    told = [line for line in heard.lines if "tensorboard" in line]
    assert told == ["tensorboard cannot be written: OSError: No space left on device; going on"]
    steps = [step for step, _ in Board(tmp_path).curve("train/loss")]
    assert steps[:3] == [1, 2, 3]
    assert steps[-3:] == [10, 11, 12]  # those before may come before the checkpoint is written
    assert len(losses(tmp_path)) == 12


# How a logger is told of the end.


class Told:
    """A logger that keeps what it is told."""

    ends: list[tuple[int, Mapping[str, Any] | None]]

    def __init__(self, start: sinks.Start) -> None: ...

    def log(self, kind: str, **values: Any) -> None: ...

    def close(self, code: int, summary: Mapping[str, Any] | None) -> None:
        self.ends.append((code, summary))


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Mapping[str, Any] | None]]:
    monkeypatch.setattr(Told, "ends", [], raising=False)
    monkeypatch.setitem(sinks.LOGGERS, "told", sinks._Kind("speedrun", Told))
    return Told.ends


@pytest.mark.parametrize(
    ("display", "how", "code"),
    [
        (Heard(), {}, 0),
        (Heard(), {"stop_after": 3}, 0),
        (Heard(3), {}, 130),
        (Heard(), {"time_limit": 0.0}, 124),
    ],
)
def test_loggers_are_closed_with_the_exit_code_and_the_summary(
    tiny: Make, tmp_path: Path, ends: list[Any], display: Heard, how: dict[str, Any], code: int
) -> None:
    summary = train(tiny(), tmp_path, display, log=("told", "told"), **how)
    assert ends == [(code, summary.as_dict())]
    assert summary == RunFolder(tmp_path).read_summary()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("a bug"), 1),
        (RunError("a mistake"), 1),
        (ConfigError("another"), 2),
        (KeyboardInterrupt(), 130),
        (SystemExit(7), 7),
        (SystemExit("words"), 1),
        (SystemExit(), 0),
    ],
    ids=repr,
)
def test_loggers_are_closed_when_a_run_dies(
    tiny: Make, tmp_path: Path, ends: list[Any], error: BaseException, code: int
) -> None:
    def raise_it() -> None:
        raise error

    with pytest.raises(type(error)):
        train(tiny(), tmp_path, Heard(at={2: raise_it}), log=("told",))
    assert ends == [(code, None)]


def test_ctrl_c_while_one_is_closed_closes_the_others(
    tiny: Make, tmp_path: Path, ends: list[Any], writer: Callable[[str, BaseException], None]
) -> None:
    writer("close", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        train(tiny("train.steps=2"), tmp_path, log=("tensorboard", "told"))
    assert [code for code, _ in ends] == [0]


# What is refused, before anything is begun.


def test_an_unknown_logger_is_refused(tiny: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'mlflow' is not known; use one of tensorboard, wandb"):
        train(tiny(), tmp_path / "run", log=("tensorboard", "mlflow"))
    assert not (tmp_path / "run").exists()


def test_a_missing_extra_is_refused(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'speedrun\[wandb\]'$"):
        train(tiny(), tmp_path / "run", log=("tensorboard", "wandb"))
    for module in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'speedrun\[tensorboard\]'$"):
        train(tiny(), tmp_path / "run", **BOARD)
    assert not (tmp_path / "run").exists()


def test_of_a_broken_installation_the_missing_module_is_named(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text("import a_piece_of_it\n")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"No module named 'a_piece_of_it'.*--force-reinstall"):
        train(tiny(), tmp_path / "run", log=("wandb",))
    assert not (tmp_path / "run").exists()


@EACH_ERROR
def test_an_installation_that_fails_otherwise_is_a_note(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, words: str
) -> None:
    """Such as a library compiled for another one, or a W&B without a login."""
    (tmp_path / "wandb.py").write_text("import builtins\nraise builtins.what_is_wrong\n")
    monkeypatch.setattr("builtins.what_is_wrong", error, raising=False)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    heard = Heard()
    assert train(tiny("train.steps=1"), tmp_path / "run", heard, log=("wandb",)).steps == 1
    (told,) = [line for line in heard.lines if "wandb" in line]
    assert told.startswith(f"wandb cannot be opened: {words}; the run goes on without it")
    assert "WANDB_MODE=offline" in told
