"""The leaderboard's rules on real runs, and attempts to bend each of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from speedrun.data.find import find_dataset
from speedrun.data.shards import PUBLIC_EOT
from speedrun.errors import ConfigError, DataError, RunError
from speedrun.science import leaderboard, records
from speedrun.science.leaderboard import RULES, check, read, submit
from speedrun.train import checkpoint
from speedrun.train.run import RunFolder
from tests.science.board import (
    ALPHA,
    TRACK,
    Board,
    change_seed,
    edit_checkpoint,
    edit_config,
    edit_metrics,
    edit_summary,
    refused,
)
from tests.train.heard import Heard


def test_runs_that_keep_the_rules_make_one_entry(board: Board, tmp_path: Path) -> None:
    file = tmp_path / "board.json"
    entry = submit(board.honest, file, ALPHA)
    assert (entry.n, entry.steps, entry.seeds, entry.evaluated) == (3, 16, (0, 1, 2), True)
    summaries = [RunFolder(run).read_summary() for run in board.honest]
    assert entry.mean == pytest.approx(np.mean([one.loss for one in summaries if one]))
    tests = [json.loads((run / "test.json").read_text())["loss"] for run in board.honest]
    assert entry.test_mean == pytest.approx(np.mean(tests))
    assert entry.test_mean != entry.mean
    submit(board.honest, file, ALPHA)  # again: still one
    assert len(read(file)) == 1
    # Sizes, length and recipe are free, and another config is another entry.
    submit(board.three(tmp_path, "model.softcap=20.0", "train.steps=20"), file, ALPHA)
    assert len(read(file)) == 2
    with pytest.raises(RunError, match="is weaker"):
        submit(board.honest, file, 0.5)


# Attempts to fool the board. Each makes runs that the rules named after it must refuse.
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


def better_losses_in_every_file(board: Board, tmp: Path) -> list[Path]:
    """With every hash put right: only the weights know."""
    runs = board.copies(tmp)
    for run in runs:
        summary = RunFolder(run).read_summary()
        assert summary
        loss = summary.loss - 0.01

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


def one_run_as_two_with_another_log(board: Board, tmp: Path) -> list[Path]:
    one, two, _ = one_run_as_three(board, tmp)
    edit_metrics(two, lambda row: {**row, "ms": 1.0} if row["kind"] == "train" else row)
    return [one, two]


def one_seed_rounded_differently(board: Board, tmp: Path) -> list[Path]:
    again = board.train(tmp / "again", "machine.microbatch=1", seed=0)
    change_seed(again, 7)
    return [*board.honest, again]


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
        (better_summary, "adds up", "val_loss is 1.0 by summary.json"),
        (faster_summary, "adds up", "and train_seconds is 0.001"),
        (stopped_when_it_was_best, "same stop", "stopped before its end"),
        (stopped_after_some_steps, "same stop", "stopped before its end"),
        (called_complete, "adds up", "steps is 12 by summary.json and 16 by config.toml"),
        (called_complete_in_the_config_too, "adds up", "another learning rate than its config"),
        (stopped_at_the_target, "same stop", "choose its own end"),
        (one_run_as_three, "every seed once", "the same metrics"),
        (one_run_as_two_with_another_log, "every seed once", "the same weights"),
        (one_seed_rounded_differently, "every seed once", "the same training losses"),
        (other_weights, "whole records", "model.safetensors does not match its SHA-256"),
        (sharing_the_machine, "own machine", "one of 2 at a time"),
    ],
)
def test_attempts_to_fool_the_board(
    board: Board, tmp_path: Path, attempt: Attempt, rule: str, found: str
) -> None:
    refused(attempt(board, tmp_path), rule, found)


@pytest.mark.parametrize(
    "override",
    [
        "data.test_fraction=0.2", "data.tokenizer=bpe:300", "data.order=sequential",
        "validation.tokens=256", "validation.rows=first", "train.target=5.2",
    ],
)  # fmt: skip
def test_what_a_track_decides_no_run_changes(board: Board, tmp_path: Path, override: str) -> None:
    refused([board.train(tmp_path / "run", override)], "the track's own", override.split("=")[0])


def test_another_text_is_refused_by_name(board: Board, tmp_path: Path) -> None:
    shutil.copytree(board.text, tmp_path / "text")
    (tmp_path / "text/more.txt").write_text("more\n")
    run = board.train(tmp_path / "run", f'data.sources=["{tmp_path / "text"}"]')
    refused([run], "the track's own", "data.sources is ")


def test_how_often_a_run_is_validated_is_its_own_matter(board: Board, tmp_path: Path) -> None:
    assert check(board.three(tmp_path, "validation.every=5", "batch.length=32"), ALPHA).n == 3


def test_a_set_is_of_one_kind(board: Board, tmp_path: Path) -> None:
    two, copies = board.honest[:2], board.copies(tmp_path / "copies")
    longer = board.train(tmp_path / "longer", "train.steps=20", seed=2)
    refused([*two, longer], "same stop", "16, 20")
    other = board.train(tmp_path / "other", "model.softcap=15.0", seed=2)
    refused([*two, other], "same recipe", "model.softcap is 15.0")
    again = board.train(tmp_path / "again", seed=1)
    refused([*two, again], "every seed once", "seeds 0, 1, 1")
    hard = board.train(tmp_path / "hard", seed=2, track="hard")
    refused([*two, hard], "one track", "hard, sums")
    for code, found in (("f" * 64, "ffffffffffff"), (None, "unknown")):
        place = json.loads((copies[2] / "environment.json").read_text())
        place["code_sha256"] = code
        (copies[2] / "environment.json").write_text(json.dumps(place))
        refused(copies, "same code", found)
    easy = board.dataset(tmp_path / "easy", *(f"{'a b ' * 800}{i}" for i in range(20)))
    elsewhere = board.train(tmp_path / "elsewhere", f"data.dir={easy}", seed=2)
    refused([*two, elsewhere], "same data")
    edit_summary(copies[1], recipe="mine")
    edit_config(copies[1], recipe="mine")
    refused(copies[:2], "same recipe", "found mine, modern")
    with pytest.raises(ConfigError, match="given twice"):
        check([*two, two[0]], ALPHA)


def test_a_mean_must_be_below_the_target_for_sure(board: Board, tmp_path: Path) -> None:
    refused(board.honest[:1], "significant", "n = 1")
    runs = board.three(tmp_path, track="hard")
    refused(runs, "significant", "p 1")
    # Which is decided before anything is evaluated: the test stays unseen.
    assert not any((run / "test.json").exists() for run in runs)


def test_a_copy_of_the_tracks_dataset_will_do(board: Board, tmp_path: Path) -> None:
    copy = shutil.copytree(find_dataset(board.config()), tmp_path / "copy")
    runs = [*board.honest[:2], board.train(tmp_path / "run", f"data.dir={copy}", seed=2)]
    assert check(runs, ALPHA).n == 3
    shutil.rmtree(copy)
    refused(runs, "weights", "there is no dataset folder")


def test_runs_of_another_python_are_listed_apart(board: Board, tmp_path: Path) -> None:
    """Its library is another text, which cannot be made here: nobody can say it is not."""
    file = tmp_path / "board.json"
    submit(board.honest, file, ALPHA)
    with (board.text / "00.txt").open("a") as text:
        text.write("a library of another version\n")
    try:
        refused(board.honest, "the track's text", "with Python 3.")
        runs = board.copies(tmp_path / "copies")
        for run in runs:
            (run / "test.json").unlink(missing_ok=True)
            place = json.loads((run / "environment.json").read_text())
            (run / "environment.json").write_text(json.dumps({**place, "python": "3.99.1"}))
        entry = submit(runs, file, ALPHA)
        assert (entry.python, entry.evaluated, entry.test_mean) == ("3.99.1", False, None)
        edit_config(runs[0], f'data.dir="{find_dataset(board.config())}"')
        refused(runs, "the track's text")  # a folder that was named has no such excuse
    finally:
        lines = [f"0 + {n} = {n}\n" for n in range(120)]
        (board.text / "00.txt").write_text("".join(lines))
    assert check([board.honest[0], *runs[1:]], ALPHA).evaluated  # the text is there again


def test_a_track_in_a_file_of_ones_own_is_known_by_name(board: Board, tmp_path: Path) -> None:
    own = tmp_path / "mine.toml"
    own.write_text(TRACK.format(text=board.text, target=5.1))
    entry = check(board.three(tmp_path, "data.val_fraction=0.2", track=str(own)), ALPHA)
    assert (entry.track, entry.evaluated) == ("mine", True)


def test_a_track_of_public_shards_takes_nothing_else(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = tmp_path / "public"
    public.mkdir()
    for split, tokens in (("train", 5_000), ("val", 2_000)):
        header = np.zeros(256, np.int32)
        header[:3] = 20240520, 1, tokens
        ids = np.random.default_rng(0).integers(0, 50, tokens).astype(np.uint16)
        ids[::100] = PUBLIC_EOT
        (public / f"x_{split}_000001.bin").write_bytes(header.tobytes() + ids.tobytes())
    text = TRACK.format(text=board.text, target=10.82).replace("every", "rows = 'first'\nevery")
    (board.folder / "shards.toml").write_text(text.replace("[data]", f"[data]\ndir = '{public}'"))

    def out_of_reach() -> NoReturn:
        raise DataError("there is no network in a test")

    monkeypatch.setattr("speedrun.data.dataset.load_gpt2", out_of_reach)
    try:
        built = find_dataset(board.config())
        words = [f"data.dir={built}"]
        run = board.train(tmp_path / "built", *words, track="shards")
        refused([run], "the track's text", "is not of public shards")
        words += ["validation.rows=spread"]
        run = board.train(tmp_path / "spread", *words, track="shards")
        refused([run], "the track's own", "validation.rows is 'spread', not 'first'")
        words = ["model.width=16", "model.heads=1", "train.steps=5"]  # the vocabulary is large
        entry = check(board.three(tmp_path, *words, track="shards"), ALPHA)
        assert entry.evaluated
        assert entry.test_mean is not None  # rows that nobody validates on
    finally:
        (board.folder / "shards.toml").unlink()


def test_a_file_that_is_no_leaderboard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a leaderboard"):
        read(tmp_path / "x.json")
    assert read(tmp_path / "none.json") == ()


def test_entries_of_older_versions_are_still_read(board: Board, tmp_path: Path) -> None:
    file = tmp_path / "board.json"
    entry = submit(board.honest, file, ALPHA).model_dump(mode="json")
    for key in ("test_mean", "python", "evaluated"):
        del entry[key]
    file.write_text(json.dumps({"entries": [entry]}))
    (old,) = read(file)
    assert (old.test_mean, old.python, old.evaluated) == (None, None, False)


def test_every_rule_that_is_named_has_a_text() -> None:
    sources = [Path(module.__file__ or "").read_text() for module in (leaderboard, records)]
    for rule in RULES:
        assert any(f'"{rule}"' in source for source in sources)


def test_machine_settings_may_differ_within_an_entry(board: Board, tmp_path: Path) -> None:
    last = board.train(tmp_path / "run", "machine.microbatch=2", seed=2)
    assert check([*board.honest[:2], last], ALPHA).n == 3
