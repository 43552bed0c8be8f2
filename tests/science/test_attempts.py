"""Attempts to fool the leaderboard: runs that each of its rules must refuse."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from speedrun.config.experiment import run_hash
from speedrun.errors import RunError
from speedrun.science.leaderboard import check
from speedrun.train import checkpoint, evaluate
from speedrun.train.run import RunFolder
from tests.science.board import (
    ALPHA,
    Board,
    change_seed,
    edit_checkpoint,
    edit_config,
    edit_environment,
    edit_meta,
    edit_metrics,
    edit_summary,
    refused,
    say_again,
)
from tests.train.heard import Heard

# Each makes runs that the rules named after it must refuse.
Attempt = Callable[[Board, Path], list[Path]]


def easy_text(board: Board, tmp: Path) -> list[Path]:
    easy = board.dataset(tmp / "easy", *(f"{'a b ' * 800}{i}" for i in range(20)))
    return board.three(tmp, f"data.dir={easy}")


def larger_validation_split(board: Board, tmp: Path) -> list[Path]:
    return board.three(tmp, "data.val_fraction=0.3")


def trained_on_the_validation_text(board: Board, tmp: Path) -> list[Path]:
    """For half of the run; then on the right text, which --force allows."""
    text = board.validation_text()
    leak = board.dataset(tmp / "leak", *(text[i::7] * 4 for i in range(7)), *[text] * 8)
    run = board.train(tmp / "run", f"data.dir={leak}", stop_after=8)
    return [board.train(run, resume=True, force=True)]


def and_traces_wiped(board: Board, tmp: Path) -> list[Path]:
    (run,) = trained_on_the_validation_text(board, tmp)
    (run / "forced.json").unlink()
    edit_summary(run, forced=[])
    return [run]


def and_the_checkpoint_too(board: Board, tmp: Path) -> list[Path]:
    (run,) = and_traces_wiped(board, tmp)
    edit_checkpoint(run, forced=[])
    return [run]


def better_losses_in_every_file(board: Board, tmp: Path, by: float = 0.01) -> list[Path]:
    """With every hash put right: only the weights know."""
    runs = board.copies(tmp)
    for run in runs:
        summary = RunFolder(run).read_summary()
        assert summary
        loss = summary.loss - by

        def lower(row: dict[str, Any], loss: float = loss) -> dict[str, Any]:
            last = row["kind"] == "val" and row["step"] == 16
            return {**row, "loss": loss} if last else row

        edit_summary(run, val_loss=loss)
        edit_checkpoint(run, val_loss=loss)
        edit_metrics(run, lower)
    return runs


def better_test(board: Board, tmp: Path) -> list[Path]:
    runs = board.copies(tmp)
    check(runs, ALPHA)
    test = json.loads((runs[2] / "test.json").read_text())
    (runs[2] / "test.json").write_text(json.dumps({**test, "loss": 1.0}))
    return runs


def looked_at_the_test_on_the_way(board: Board, tmp: Path) -> list[Path]:
    """It stopped at its target, was tested, and went on."""
    run = board.train(tmp / "run", "train.stop=target")
    first = evaluate.tested(RunFolder(run))
    board.train(run, resume=True)
    last = evaluate.tested(RunFolder(run))
    assert first
    assert last
    assert [one.step for one in last.all] == [16, first.step]
    assert last.earlier == first.all
    return [run]


def and_came_back_to_the_weights_it_liked(board: Board, tmp: Path) -> list[Path]:
    """Which are not tested a second time, and still were not the only ones."""
    (run,) = looked_at_the_test_on_the_way(board, tmp)
    before = evaluate.read_test(RunFolder(run))
    assert before
    last, first = (one.model_dump() for one in before.all)
    again = board.train(tmp / "again")
    (again / "test.json").write_text(json.dumps({**first, "earlier": [last]}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "evaluate", None)
        assert evaluate.tested(RunFolder(again)) == before
    return [again]


def better_summary(board: Board, tmp: Path) -> list[Path]:
    runs = board.copies(tmp)
    edit_summary(runs[2], val_loss=1.0)
    return runs


def faster_summary(board: Board, tmp: Path) -> list[Path]:
    runs = board.copies(tmp)
    edit_summary(runs[2], train_seconds=0.001)
    edit_checkpoint(runs[2], seconds=0.001)
    return runs


def stopped_when_it_was_best(board: Board, tmp: Path) -> list[Path]:
    return [board.train(tmp / "run", display=Heard(12))]


def stopped_after_some_steps(board: Board, tmp: Path) -> list[Path]:
    return [board.train(tmp / "run", stop_after=12)]


def called_complete(board: Board, tmp: Path) -> list[Path]:
    (run,) = stopped_after_some_steps(board, tmp)
    edit_summary(run, stopped_early=False)
    return [run]


def called_complete_in_the_config_too(board: Board, tmp: Path) -> list[Path]:
    """But the rates of its steps were those of a longer run."""
    (run,) = called_complete(board, tmp)
    edit_config(run, "train.steps=12")
    return [run]


def stopped_at_the_target(board: Board, tmp: Path) -> list[Path]:
    return [board.train(tmp / "run", "train.stop=target")]


def one_run_as_three(board: Board, tmp: Path) -> list[Path]:
    runs = [Path(shutil.copytree(board.honest[2], tmp / f"{seed}")) for seed in range(3)]
    for seed, run in enumerate(runs):
        change_seed(run, seed)
    return runs


def one_run_as_three_of_an_older_version(board: Board, tmp: Path) -> list[Path]:
    """Whose starts do not say of which seed they are."""
    runs = one_run_as_three(board, tmp)
    for run in runs:
        say_again(run, older=True)
    return runs


def one_run_goes_on_as_three(board: Board, tmp: Path) -> list[Path]:
    """From half of the way on, each with a seed of its own."""
    run = board.train(tmp / "run", stop_after=8)
    copies = [Path(shutil.copytree(run, tmp / f"{seed}")) for seed in range(3)]
    for seed, copy in enumerate(copies):
        edit_config(copy, f"train.seed={seed}", seal=False)
        with pytest.raises(RunError, match=r"config\.toml was edited") if seed else nullcontext():
            board.train(copy, seed=seed, resume=True)
        board.train(copy, seed=seed, resume=True, force=True)
    return copies


def and_the_force_hidden(board: Board, tmp: Path) -> list[Path]:
    runs = one_run_goes_on_as_three(board, tmp)
    for run in runs[1:]:
        (run / "forced.json").unlink()
        edit_summary(run, forced=[])
        edit_checkpoint(run, forced=[])
    return runs


def another_rate_from_the_middle_on(board: Board, tmp: Path) -> list[Path]:
    """Without --force: the checkpoint is made to forget its config."""
    run = board.train(tmp / "run", stop_after=8)
    edit_config(run, "optimizer.head.lr=0.5", seal=False)
    edit_meta(run, experiment_sha256=run_hash(RunFolder(run).load_config()))
    return [board.train(run, "optimizer.head.lr=0.5", resume=True)]


def other_code_than_it_says(board: Board, tmp: Path) -> list[Path]:
    runs = board.copies(tmp)
    edit_environment(runs[2], seal=False, code_sha256="f" * 64)
    return runs


def edited_after_the_end(board: Board, tmp: Path) -> list[Path]:
    runs = board.copies(tmp)
    for run in runs:
        edit_config(run, "optimizer.head.lr=0.5", seal=False)
    return runs


def as_long_as_it_took(board: Board, tmp: Path) -> list[Path]:
    """A step more, until the mean was where it should be; no step would have been another."""
    flat = ("schedule.cooldown=0", "schedule.warmup=0", "schedule.momentum_warmup=0")
    run = board.train(tmp / "run", *flat, "train.steps=4")
    for steps in (5, 6):
        board.train(run, *flat, f"train.steps={steps}", resume=True)
    return [run]


def one_seed_rounded_differently(board: Board, tmp: Path) -> list[Path]:
    again = board.train(tmp / "again", "machine.microbatch=1", seed=0)
    edit_config(again, "machine.microbatch=0")
    change_seed(again, 3)
    return [*board.honest, again]


def the_best_of_many_roundings(board: Board, tmp: Path) -> list[Path]:
    return [*board.honest[:2], board.train(tmp / "again", "machine.microbatch=1", seed=2)]


def one_run_of_another_machine(board: Board, tmp: Path) -> list[Path]:
    runs = board.copies(tmp)
    edit_environment(runs[2], cpu="a faster one")
    return runs


def begun_on_another_machine(board: Board, tmp: Path) -> list[Path]:
    runs = board.copies(tmp)
    edit_environment(runs[2], earlier=[{"cpu": "a faster one"}])
    return runs


def seconds_that_are_no_number(board: Board, tmp: Path) -> list[Path]:
    runs = board.copies(tmp)
    file = runs[2] / "summary.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "wall_seconds": math.nan}))
    return runs


def a_name_that_draws_on_the_table(board: Board, tmp: Path) -> list[Path]:
    runs = board.copies(tmp)
    for run in runs:
        edit_summary(run, recipe="best\n\x1b[2J")
        edit_config(run, recipe="best\n\x1b[2J")
    return runs


def earlier_at_the_target(board: Board, tmp: Path) -> list[Path]:
    runs = board.copies(tmp)
    edit_summary(runs[2], steps_to_target=1.0)
    return runs


def the_best_seeds_of_many(board: Board, tmp: Path) -> list[Path]:
    runs = board.copies(tmp)
    change_seed(runs[2], 5)
    return runs


def all_seeds_but_the_first(board: Board, tmp: Path) -> list[Path]:
    return board.honest[1:]


def other_weights(board: Board, tmp: Path) -> list[Path]:
    """Those of a run twice as long, which have a better loss than was stated."""
    run = board.copies(tmp)[0]
    longer = board.train(tmp / "longer", "train.steps=32")
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        shutil.copy(longer / "checkpoints/step-000032" / name, run / "checkpoints/step-000016")
    return [run, *board.honest[1:]]


def easier_target(board: Board, tmp: Path) -> list[Path]:
    return [board.train(tmp / "run", "train.target=5.5")]


def sharing_the_machine(board: Board, tmp: Path) -> list[Path]:
    return [board.train(tmp / "run", "machine.jobs=2")]


@pytest.mark.parametrize(
    ("attempt", "rule", "found"),
    [
        (easy_text, "the track's text", "and sums makes "),
        (larger_validation_split, "the track's own", "data.val_fraction is 0.3, not 0.05"),
        (easier_target, "the track's own", "train.target is 5.5, not 5.1"),
        (trained_on_the_validation_text, "not forced", "at step 8: the dataset has fingerprint"),
        (and_traces_wiped, "not forced", "at step 8"),
        (and_the_checkpoint_too, "adds up", "from step 0 it was trained on dataset"),
        (better_losses_in_every_file, "weights", "have a validation loss of 4."),
        (better_test, "weights", "and test.json states 1.0000"),
        (looked_at_the_test_on_the_way, "test once", "was tested with other weights, of step "),
        (and_came_back_to_the_weights_it_liked, "test once", "tested with other weights, of step "),
        (better_summary, "adds up", "val_loss is 1.0 by summary.json"),
        (faster_summary, "adds up", "and train_seconds is 0.001"),
        (stopped_when_it_was_best, "same stop", "stopped before its end"),
        (stopped_after_some_steps, "same stop", "stopped before its end"),
        (called_complete, "adds up", "steps is 12 by summary.json and 16 by config.toml"),
        (called_complete_in_the_config_too, "adds up", "another learning rate than its config"),
        (stopped_at_the_target, "same stop", "choose its own end"),
        (as_long_as_it_took, "same stop", "was to end at step 4 when it stood at 0, and ends at 6"),
        (one_run_as_three, "every seed once", "the same weights"),
        (one_run_as_three_of_an_older_version, "every seed once", "the same metrics"),
        (one_run_goes_on_as_three, "not forced", "at step 8: config.toml was edited since"),
        (and_the_force_hidden, "adds up", "from step 0 it was made with another config than"),
        (another_rate_from_the_middle_on, "adds up", "from step 0 it was made with another config"),
        (other_code_than_it_says, "adds up", "made with another code than environment.json has"),
        (edited_after_the_end, "adds up", "was made with another config than config.toml has"),
        (one_seed_rounded_differently, "every seed once", "the same training losses"),
        (the_best_seeds_of_many, "every seed once", "found 0, 1, 5"),
        (all_seeds_but_the_first, "every seed once", "found 1, 2"),
        (other_weights, "whole records", "model.safetensors does not match its SHA-256"),
        (sharing_the_machine, "own machine", "one of 2 at a time"),
        (the_best_of_many_roundings, "same recipe", "machine.microbatch is 1 in"),
        (one_run_of_another_machine, "one machine", "cpu is 'a faster one' in"),
        (begun_on_another_machine, "one machine", "was made in part with {'cpu': 'a faster"),
        (seconds_that_are_no_number, "whole records", "states wall_seconds = nan"),
        (a_name_that_draws_on_the_table, "whole records", "which is no name"),
        (earlier_at_the_target, "adds up", "steps_to_target is 1.0"),
    ],
)
def test_attempts_to_fool_the_board(
    board: Board, tmp_path: Path, attempt: Attempt, rule: str, found: str
) -> None:
    refused(attempt(board, tmp_path), rule, found)


def test_what_is_within_the_tolerance_does_not_count(board: Board, tmp_path: Path) -> None:
    """Machines round differently, so a little less is let pass; the board has what it found."""
    honest = check(board.honest, ALPHA)
    runs = better_losses_in_every_file(board, tmp_path, by=0.0015)
    for run in runs:
        test = json.loads((run / "test.json").read_text())
        (run / "test.json").write_text(json.dumps({**test, "loss": test["loss"] - 0.0015}))
    entry = check(runs, ALPHA)
    assert (entry.mean, entry.p, entry.test_mean) == (honest.mean, honest.p, honest.test_mean)
