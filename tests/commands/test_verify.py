"""`speedrun verify`, `submit` and `leaderboard`: what they print, refuse and exit with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats as reference

from speedrun.commands.verify import leaderboard_command, submit_command, verify_command
from speedrun.config.resolve import resolve, to_toml
from speedrun.config.schema import Config
from speedrun.errors import ConfigError
from speedrun.files import write_json
from speedrun.science.leaderboard import read, submit
from speedrun.science.track import NOT_HERE
from tests.report.made import made_summary
from tests.science.board import Board, edit_config, edit_summary
from tests.train.heard import train


def run_folder(path: Path, loss: float | None, **changes: Any) -> Path:
    path.mkdir()
    made_summary(val_loss=loss, target=3.28, **changes).write(path / "summary.json")
    return path


def verify(
    runs: Sequence[Path],
    target: float | None = 3.28,
    losses: Path | None = None,
    as_json: bool = False,
) -> int:
    return verify_command(
        runs=runs, target=target, alpha=0.01, losses=losses, sigma=None, as_json=as_json
    )


def test_the_verdict_is_printed_and_is_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = [3.270, 3.272, 3.274, 3.271]
    runs = [run_folder(tmp_path / f"{i}", loss, seed=i) for i, loss in enumerate(losses)]
    assert verify(runs, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    expected = reference.ttest_1samp(losses, 3.28, alternative="less")
    assert set(found) >= {"n", "mean", "std", "t", "p", "holds"}
    assert found["n"] == 4
    assert found["std"] == pytest.approx(np.std(losses, ddof=1))
    assert found["p"] == pytest.approx(expected.pvalue)
    assert found["holds"] is True
    assert verify(runs, 3.2) == 1
    assert "does not hold: mean below 3.2" in capsys.readouterr().out
    assert verify(runs, None) == 0  # the runs' own target


def test_notes_on_what_misleads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run_folder(tmp_path / "a", 3.27)
    second = run_folder(tmp_path / "b", 3.26, steps=9)
    third = run_folder(tmp_path / "c", 3.25, recipe="other")
    verify([first, second, third])
    shown = capsys.readouterr().out
    for words in ("different recipes: modern, other", "different steps", "share a seed"):
        assert words in shown
    assert "by construction" not in shown
    (first / "config.toml").write_text(
        to_toml(resolve("modern", "nano", ["train.stop=target"]).config)
    )
    verify([first, second, third])
    assert "by construction" in capsys.readouterr().out


def test_notes_on_runs_that_are_not_what_they_say(
    board: Board, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verify(board.honest, None)
    assert "note" not in capsys.readouterr().out
    runs = board.copies(tmp_path)
    edit_config(runs[1], "optimizer.head.lr=0.5")
    edit_config(runs[2], "optimizer.head.lr=0.5", "model.softcap=20.0", seal=False)
    (runs[1] / "forced.json").write_text('["at step 8: the code has changed"]')
    edit_summary(runs[1], wall_seconds=0.001)
    assert verify(runs, None) == 0  # the exit code is the claim's
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert notes == [
        "note: the runs differ in more than the seed: optimizer.head.lr, model.softcap",
        f"note: a run was resumed with --force: {runs[1]}, at step 8: the code has changed",
        f"note: records do not add up: {runs[1]}: {notes[2].split(': ', 3)[3]}",
    ]
    assert notes[2].endswith("(the first of 2 runs)")
    (runs[0] / "environment.json").unlink()
    assert verify(runs, None, as_json=True) == 0
    said = json.loads(capsys.readouterr().out)["notes"]
    missing = f"records are not whole: {runs[0]} has no environment.json: restore it"
    assert any(line.startswith(missing) for line in said)


def test_a_run_that_diverged_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_folder(tmp_path / f"{i}", 3.27, seed=i) for i in range(3)]
    runs.append(run_folder(tmp_path / "ill", None, seed=3))  # NaN is null in a summary
    assert verify(runs, as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["n"] == 4


def test_misuse_is_one_sentence_and_exit_2(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "a", 3.27)
    early = run_folder(tmp_path / "early", 3.27, stopped_early=True)
    damaged = run_folder(tmp_path / "damaged", 3.27)
    (damaged / "summary.json").write_text('{"val_loss": 3.2}')
    nested = run_folder(tmp_path / "nested", 3.27)
    (nested / "summary.json").write_text("[" * 100_000)
    (tmp_path / "file.csv").write_text("3.1\n")
    cases: list[tuple[list[Path], float | None, Path | None, str]] = [
        ([], 3.28, None, "either run folders or --losses"),
        ([run], 3.28, tmp_path / "file.csv", "not both"),
        ([], None, tmp_path / "file.csv", "--target is needed"),
        ([run, tmp_path / "." / "a"], 3.28, None, "given twice"),
        ([tmp_path], 3.28, None, "not a run folder"),
        ([early], 3.28, None, "stopped before its end"),
        ([nested], 3.28, None, "summary.json cannot be read as JSON: it is nested too deeply"),
        ([damaged], 3.28, None, "summary.json is not a run's summary: it has no 'recipe'"),
    ]
    for runs, target, losses, sentence in cases:
        with pytest.raises(ConfigError, match=sentence) as caught:
            verify(runs, target, losses)
        assert caught.value.exit_code == 2


def test_losses_on_different_datasets_have_no_mean(tmp_path: Path) -> None:
    one = run_folder(tmp_path / "a", 3.27)
    other = run_folder(tmp_path / "b", 3.27, seed=1, dataset_fingerprint="e" * 64)
    with pytest.raises(ConfigError, match="validated on different datasets, so their mean") as it:
        verify([one, other])
    assert it.value.exit_code == 2


Captured = pytest.CaptureFixture[str]


def test_the_test_stands_beside_the_validation(board: Board, capsys: Captured) -> None:
    assert verify(board.honest, None) == 0
    shown = capsys.readouterr().out
    assert verify(board.honest, None, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    losses = [json.loads((run / "test.json").read_text())["loss"] for run in board.honest]
    assert found["test_mean"] == pytest.approx(np.mean(losses))
    assert (
        f"test:                {found['test_mean']:.5f} (validation {found['mean']:.5f})" in shown
    )


def test_a_dataset_without_a_test_says_so(
    tiny: Callable[..., Config], tmp_path: Path, capsys: Captured
) -> None:
    train(tiny("train.target=9.0"), tmp_path / "run")
    verify([tmp_path / "run"], None)
    assert "test:                none: the dataset has no test split" in capsys.readouterr().out
    verify([tmp_path / "run"], None, as_json=True)
    assert json.loads(capsys.readouterr().out)["test_mean"] is None


def test_what_cannot_be_tested_is_a_note(board: Board, tmp_path: Path, capsys: Captured) -> None:
    """Neither weights nor dataset are needed for a verdict."""
    alone = run_folder(tmp_path / "alone", 3.27)
    moved = Path(shutil.copytree(board.honest[0], tmp_path / "moved"))
    (moved / "test.json").unlink(missing_ok=True)
    text = (moved / "config.toml").read_text()
    (moved / "config.toml").write_text(text.replace('dir = ""', 'dir = "/nowhere"'))
    unlike = Path(shutil.copytree(board.honest[0], tmp_path / "unlike"))
    (unlike / "test.json").unlink(missing_ok=True)
    (unlike / "config.toml").write_text(text.replace("width = 32", "width = 64"))
    for run, reason in (
        (alone, "has no whole checkpoint"),
        (moved, "there is no dataset folder /nowhere"),
        (unlike, "was edited: the weights of step"),
    ):
        assert verify([run], 9.0) == 1  # one run has no spread
        shown = capsys.readouterr().out
        assert "note: the test could not be evaluated: " in shown
        assert reason in shown
        verify([run], 9.0, as_json=True)
        assert json.loads(capsys.readouterr().out)["test_mean"] is None


def test_a_file_of_losses_has_no_test(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file.csv").write_text("3.1\n3.2\n")
    verify([], 3.28, tmp_path / "file.csv")
    assert "test" not in capsys.readouterr().out


def test_submit_prints_the_leaderboard(board: Board, tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "board.json"
    leaderboard_command(file=file)
    assert "the leaderboard is empty" in capsys.readouterr().out
    submit_command(runs=board.honest, file=file, alpha=0.01)
    shown = capsys.readouterr().out
    (entry,) = read(file)
    # What takes its time is said before it is done.
    assert shown.startswith("building the text of sums again to compare: scan: ")
    heading = f"track sums, dataset {entry.dataset_fingerprint[:12]}, Python {entry.python}\n"
    shown = shown[shown.index(heading) :]
    assert shown.splitlines()[1] == "target 5.1, judged on 512 tokens in rows of 64, spread"
    for words in ("modern", "4,096", f"{entry.mean:.4f}", f"{entry.test_mean:.4f}", entry.machine):
        assert words in shown
    leaderboard_command(file=file)
    assert capsys.readouterr().out == shown
    file.write_text('{"entries": [{"track": "nano"}]}')
    with pytest.raises(ConfigError, match=r"not a leaderboard: entries\[0\] has no 'recipe'"):
        leaderboard_command(file=file)


def test_each_text_has_its_own_table(board: Board, tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "board.json"
    mine = submit(board.honest, file, 0.01)
    capsys.readouterr()
    other = {"dataset_fingerprint": "f" * 64, "python": "3.99.1"}
    entries = [
        mine.model_copy(update={**other, "recipe": "another"}),
        mine,
        mine.model_copy(update={"track": "a", "recipe": "untested", "test_mean": None}),
        mine.model_copy(update={"recipe": "slower", "train_seconds": 999.0}),
    ]
    write_json(file, {"entries": [entry.model_dump(mode="json") for entry in entries]})
    leaderboard_command(file=file)
    first, second, third = capsys.readouterr().out.split("\n\n")
    assert first.startswith("track a, dataset ")
    assert " none " in first
    assert second.startswith(f"track sums, dataset {mine.dataset_fingerprint[:12]}, Python 3.")
    assert second.index("modern") < second.index("slower")
    assert third.startswith("track sums, dataset ffffffffffff, Python 3.99.1\n")
    assert "unknown" not in first + second + third


def test_what_is_not_judged_alike_is_in_no_table_together(
    board: Board, tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "board.json"
    mine = submit(board.honest, file, 0.01)
    capsys.readouterr()
    changes: list[dict[str, Any]] = [
        {},
        {"judged_on": "64 tokens in rows of 64, spread"},
        {"target": 5.9},
        {"shards_sha256": "a" * 64},
        {"shards_sha256": "b" * 64},
        {"unchecked": NOT_HERE, "evaluated": False, "test_mean": None},
    ]
    entries = [mine.model_copy(update=change) for change in changes]
    write_json(file, {"entries": [entry.model_dump(mode="json") for entry in reversed(entries)]})
    leaderboard_command(file=file)
    tables = capsys.readouterr().out.split("\n\n")
    lines = [
        "target 5.1, judged on 512 tokens in rows of 64, spread",
        "target 5.1, judged on 64 tokens in rows of 64, spread",
        "target 5.9, judged on 512 tokens in rows of 64, spread",
        "public shards with SHA-256 aaaaaaaaaaaa in all, trusted to be those of the track",
        "public shards with SHA-256 bbbbbbbbbbbb in all, trusted to be those of the track",
        "unchecked: its text is not on this machine",
    ]
    assert len(tables) == len(lines)
    for table, line in zip(tables, lines, strict=True):
        assert line in table.splitlines()
        assert table.count("modern") == 1
        assert ("unchecked" in table) == line.startswith("unchecked")
    assert "unknown: the weights were not evaluated" in tables[-1]
