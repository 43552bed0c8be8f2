"""What a run states of itself: every file whole, all of it in agreement, and honest detours."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from speedrun.data.loader import Batch
from speedrun.science import records
from speedrun.science.leaderboard import check
from speedrun.train import checkpoint
from speedrun.train.outcomes import NONFINITE_STEPS
from speedrun.train.request import Interval
from speedrun.train.run import RunFolder
from speedrun.train.trainer import Trainer
from tests.science.board import (
    ALPHA,
    Board,
    edit_checkpoint,
    edit_config,
    edit_metrics,
    edit_summary,
    refused,
)
from tests.train.heard import Heard, values


def lose_row(kind: str, step: int) -> Callable[[Path], None]:
    def is_it(row: dict[str, Any]) -> bool:
        return bool(row["kind"] == kind and row["step"] == step)

    return lambda run: edit_metrics(run, lambda row: None if is_it(row) else row)


def restate(kind: str, step: int, /, **changes: Any) -> Callable[[Path], None]:
    def changed(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, **changes} if row["kind"] == kind and row["step"] == step else row

    return lambda run: edit_metrics(run, changed)


def twice(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    again = next(line for line in lines if '"kind": "train", "step": 5' in line)
    (run / "metrics.jsonl").write_text("".join([*lines[:20], again, *lines[20:]]))
    edit_metrics(run, lambda row: row)


def one_byte(run: Path) -> None:
    data = bytearray((run / "metrics.jsonl").read_bytes())
    data[100] = 0xFF
    (run / "metrics.jsonl").write_bytes(data)


def sealed(spoil: Callable[[Path], None]) -> Callable[[Path], None]:
    """With the hash of what is there now."""

    def both(run: Path) -> None:
        spoil(run)
        edit_summary(run, metrics_sha256=RunFolder(run).metrics_digest())

    return both


def a_hundred_times_faster(run: Path) -> None:
    """By the clock of every file; the rows keep how long each step took."""

    def faster(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "seconds": round(row["seconds"] / 100, 6)} if "seconds" in row else row

    summary = RunFolder(run).read_summary()
    assert summary
    edit_metrics(run, faster)
    edit_checkpoint(run, seconds=summary.train_seconds / 100)
    edit_summary(run, train_seconds=summary.train_seconds / 100)


def a_folder(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl is missing"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "metrics.jsonl is missing"),
        (a_folder, "metrics.jsonl is missing"),
        (one_byte, "does not have the SHA-256"),
        (sealed(one_byte), "line 1 of metrics.jsonl cannot be used"),
        (lambda run: edit_summary(run, metrics_sha256=None), "does not have the SHA-256"),
        (lambda run: edit_metrics(run, lambda row: {**row, "x": 1}, seal=False), "the SHA-256"),
        (lose_row("train", 7), "row of step 7 is missing: after step 6 comes 8"),
        (lose_row("train", 16), "when 15 steps are done"),
        (lose_row("val", 16), "was not validated at the last step"),
        (lose_row("start", 0), "do not begin with a start"),
        (lose_row("end", 16), "no row of the run's end"),
        (twice, "is missing: after step"),
        (restate("train", 3, tokens=5), "step 3 stands at 5 tokens"),
        (restate("train", 3, seconds=0.0), "the clock falls"),
        (restate("train", 3, seconds="late"), "has no usable 'seconds'"),
        (restate("train", 3, lr_multiplier=0.5), "another learning rate"),
        (restate("train", 16, seconds=1e6), "step 16 took 99"),
        (restate("train", 5, ms=1.0), "step 5 took "),
        (restate("val", 8, seconds=1e-3), "it is validated at 0.001 s, when its clock stands at"),
        (a_hundred_times_faster, "by its own row"),
        (lambda run: edit_summary(run, wall_seconds=0.001), "wall_seconds is 0.001, its last step"),
        (lambda run: edit_summary(run, params=7), "params is 7 by summary.json and "),
        (restate("val", 16, loss=1.0), "its last validation gave 1.0"),
        (restate("val", 16, val_tokens=64), "on 64 tokens"),
        (restate("val", 8, step=9), "validated at step 9 when 8 steps are done"),
        (restate("val", 4, loss=1.0), "and tokens_to_target is "),
        (restate("end", 16, code=2), "do not end with the last step and exit code 0"),
        (lambda run: edit_summary(run, tokens_to_target=256), "tokens_to_target is 256"),
        (lambda run: edit_summary(run, seconds_to_target=1e-9), "seconds_to_target is 1e-09"),
        (lambda run: edit_summary(run, seed=9), "seed is 9 by summary.json and 2 by config.toml"),
        (lambda run: edit_summary(run, recipe="best"), "recipe is 'best'"),
        (lambda run: edit_summary(run, dataset_fingerprint="e" * 64), "dataset_fingerprint is"),
        (lambda run: edit_config(run, track="hard"), "track is 'sums'"),
    ],
)
def test_metrics_and_result_must_add_up(
    board: Board, tmp_path: Path, spoil: Callable[[Path], None], found: str
) -> None:
    (*_, last) = runs = board.copies(tmp_path)
    spoil(last)
    refused(runs, "adds up", found)


def remove_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def cut(name: str) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        file = run / "checkpoints/step-000016" / name
        file.write_bytes(file.read_bytes()[:-9])

    return spoil


def write(name: str, text: str) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        (run / name).write_text(text)

    return spoil


def make_folder(name: str) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        (run / name).unlink()
        (run / name).mkdir()

    return spoil


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda run: (run / "environment.json").unlink(), "has no environment.json"),
        (write("environment.json", "{"), "environment.json cannot be read as JSON"),
        (write("environment.json", '{"cores": "two"}'), "cores is 'two'"),
        (write("environment.json", "[]"), "holds no JSON object"),
        (make_folder("environment.json"), "environment.json cannot be read"),
        (lambda run: (run / "summary.json").unlink(), "it has no summary.json"),
        (write("summary.json", "[1]"), "holds no JSON object"),
        (write("summary.json", "[" * 100_000), "nested too deeply"),
        (lambda run: edit_summary(run, steps="16"), "steps is '16'"),
        (make_folder("summary.json"), "summary.json cannot be read"),
        (lambda run: (run / "config.toml").unlink(), "it has no config.toml"),
        (write("config.toml", "= 3"), "cannot be read as a stored config"),
        (write("config.toml", "model = 3"), "model"),
        (make_folder("config.toml"), "it has no config.toml"),
        (write("forced.json", "{}"), "is not a list of sentences"),
        (write("test.json", '{"loss": 1.0}'), "is not the result of a test: it has no 'tokens'"),
        (remove_checkpoints, "has no checkpoint"),
        (cut(checkpoint.MODEL), "model.safetensors has"),
        (cut(checkpoint.META), "checkpoint.json is not what was written"),
        (lambda run: edit_checkpoint(run, seconds="long"), "progress.seconds is 'long'"),
        (shutil.rmtree, "is not a run folder"),
    ],
)
def test_missing_and_damaged_files_are_one_sentence(
    board: Board, tmp_path: Path, spoil: Callable[[Path], None], found: str
) -> None:
    (*_, last) = runs = board.copies(tmp_path)
    spoil(last)
    refused(runs, "whole records", found)


def test_an_empty_config_is_not_taken_for_the_defaults(board: Board, tmp_path: Path) -> None:
    (*_, last) = runs = board.copies(tmp_path)
    (last / "config.toml").write_text("")
    refused(runs, "whole records", "states no recipe")


def test_a_run_that_weighs_other_than_its_config_says(board: Board, tmp_path: Path) -> None:
    runs = board.copies(tmp_path)
    for run in runs:
        edit_config(run, "model.width=64")
    refused(runs, "adds up", "by the model of config.toml")
    for run in runs:
        edit_summary(run, params=records.read(RunFolder(run)).params)
    refused(runs, "weights", "do not fit its records")


def test_runs_that_were_stopped_and_went_on_are_honest(board: Board, tmp_path: Path) -> None:
    runs = [*board.honest[:2], board.train(tmp_path / "run", seed=2, display=Heard(5))]
    refused(runs, "same stop")
    board.train(runs[2], seed=2, resume=True, stop_after=11)
    board.train(runs[2], seed=2, resume=True)
    assert values(runs[2], "end", "code")[0] != 0
    entry = check(runs, ALPHA)
    assert entry.mean == check(board.honest, ALPHA).mean  # to the last bit


def test_runs_that_went_back_are_honest(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Trainer.training_loss
    bad = range(9, 9 + NONFINITE_STEPS)

    def spoilt(self: Trainer, batch: Batch) -> Tensor:
        return honest(self, batch) * (math.nan if self.loader.position - 1 in bad else 1.0)

    monkeypatch.setattr(Trainer, "training_loss", spoilt)
    run = board.train(tmp_path / "run", seed=2, checkpoint_every=Interval(steps=6))
    assert values(run, "rewind") == [6]
    assert check([*board.honest[:2], run], ALPHA).n == 3
    # Without the row that says so, the steps made twice are steps made twice.
    edit_metrics(run, lambda row: None if row["kind"] == "rewind" else row)
    refused([run], "adds up", "the row of step 13 is missing: after step 12 comes 7")
