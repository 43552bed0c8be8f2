"""`speedrun verify`, `submit` and `leaderboard`: what they print, refuse and exit with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats as reference

from speedrun.commands.verify import leaderboard_command, submit_command, verify_command
from speedrun.config.resolve import resolve, to_toml
from speedrun.errors import ConfigError
from speedrun.train.run import RunFolder
from tests.report.made import made_summary


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
    (tmp_path / "file.csv").write_text("3.1\n")
    cases: list[tuple[list[Path], float | None, Path | None, str]] = [
        ([], 3.28, None, "either run folders or --losses"),
        ([run], 3.28, tmp_path / "file.csv", "not both"),
        ([], None, tmp_path / "file.csv", "--target is needed"),
        ([run, tmp_path / "." / "a"], 3.28, None, "given twice"),
        ([tmp_path], 3.28, None, "not a run folder"),
        ([early], 3.28, None, "stopped before its end"),
        ([damaged], 3.28, None, "summary.json is not a run's summary: it has no 'recipe'"),
    ]
    for runs, target, losses, sentence in cases:
        with pytest.raises(ConfigError, match=sentence) as caught:
            verify(runs, target, losses)
        assert caught.value.exit_code == 2


def test_submit_prints_the_leaderboard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    board = tmp_path / "board.json"
    leaderboard_command(file=board)
    assert "the leaderboard is empty" in capsys.readouterr().out
    runs = []
    for seed, loss in enumerate((3.9, 3.91, 3.89)):
        runs.append(run_folder(tmp_path / f"{seed}", loss, seed=seed, tokens=819_200))
        config = resolve("modern", "nano", [f"train.seed={seed}"]).config
        place = {"code_sha256": "c" * 64, "cpu": "abacus", "cores": 2}
        RunFolder(runs[-1]).describe(config, place)
    submit_command(runs=runs, file=board, alpha=0.01)
    shown = capsys.readouterr().out
    for words in ("nano", "modern", "819,200", "3.9000", "abacus, 2 cores"):
        assert words in shown
    leaderboard_command(file=board)
    assert capsys.readouterr().out == shown
    board.write_text('{"entries": [{"track": "nano"}]}')
    with pytest.raises(ConfigError, match=r"not a leaderboard: entries\[0\] has no 'recipe'"):
        leaderboard_command(file=board)
