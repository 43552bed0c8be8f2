"""The speedrun's rule on published losses, on corners, and through the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats as reference

from speedrun.config.resolve import resolve, to_toml
from speedrun.errors import ConfigError
from speedrun.science.command import verify_command
from speedrun.science.published import TARGET, curves
from speedrun.science.verify import read_losses, verify


@pytest.mark.parametrize(
    ("record", "n", "p"), [(13, 7, 0.041), (14, 40, 3e-4), (15, 75, 1.4e-8), (16, 40, 1.3e-4)]
)
def test_published_p_values(record: int, n: int, p: float) -> None:
    losses = curves()[record].final_losses
    verdict = verify(losses, TARGET)
    expected = reference.ttest_1samp(losses, TARGET, alternative="less")
    assert verdict.n == n
    assert verdict.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert verdict.t == pytest.approx(expected.statistic, rel=1e-9)
    assert verdict.p == pytest.approx(p, rel=0.2 if record == 14 else 0.05)  # stated to one digit
    assert verdict.holds == (record > 13)


def test_record_18_over_its_eighty_runs() -> None:
    verdict = verify(curves()[18].final_losses, TARGET)
    assert verdict.n == 80
    assert verdict.p == pytest.approx(6.7e-5, rel=0.02)


@pytest.mark.parametrize(
    ("n", "mean", "passes"),
    [(1, 3.2759, True), (1, 3.2763, False), (4, 3.2779, True), (4, 3.2781, False)],
)
def test_z_rule_of_the_optimizer_track(n: int, mean: float, passes: bool) -> None:
    """(3.28 - mean) sqrt(n) >= 0.004 with sigma 0.0013: one run needs 3.276, four 3.278."""
    verdict = verify([mean] * n, 3.28, alpha=0.001, sigma=0.0013)
    assert verdict.test == "z"
    assert verdict.holds == passes


def test_one_run_is_not_enough_without_sigma() -> None:
    verdict = verify([3.0], 3.28)
    assert (verdict.holds, verdict.t, verdict.p, verdict.std) == (False, None, None, None)
    assert "one run" in verdict.notes[0]


@pytest.mark.parametrize(("loss", "p"), [(3.27, 0.0), (3.28, 0.5), (3.29, 1.0)])
def test_no_variance(loss: float, p: float) -> None:
    verdict = verify([loss] * 3, 3.28)
    assert (verdict.p, verdict.t, verdict.std) == (p, None, 0.0)
    assert verdict.holds == (p == 0.0)
    assert "equal" in verdict.notes[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_diverged_run_is_never_left_out(bad: float) -> None:
    verdict = verify([3.0, 3.01, bad], 3.28)
    assert (verdict.holds, verdict.mean, verdict.p) == (False, None, None)
    assert json.loads(verdict.as_json())["mean"] is None


@pytest.mark.parametrize(
    ("text", "losses"),
    [
        ("3.1\n3.2\n", [3.1, 3.2]),
        ("\ufeffval_loss\r\n3.1\r\n\r\n3.2\r\n", [3.1, 3.2]),
        ("run,val_loss,ms\n0,3.1,5\n1, 3.2 ,6\n", [3.1, 3.2]),
    ],
)
def test_loss_files(tmp_path: Path, text: str, losses: list[float]) -> None:
    path = tmp_path / "losses.csv"
    path.write_text(text, encoding="utf-8")
    assert read_losses(path) == losses


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no losses"),
        ("val_loss\n", "holds no losses"),
        ("run,loss\n0,3.1\n", "no column 'val_loss', only run, loss"),
        ("3.1,3.2\n", "2 columns and no header"),
        ("val_loss\n3.1\nlow\n", "line 3: 'low' is not a number"),
        ("a,val_loss\n1\n", "line 2: '' is not a number"),
    ],
)
def test_loss_files_refused(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "losses.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        read_losses(path)


def test_missing_loss_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_losses(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("alpha", "sigma"), [(0.0, None), (1.0, None), (0.01, 0.0), (0.01, math.nan)]
)
def test_options_refused(alpha: float, sigma: float | None) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        verify([3.0, 3.1], 3.28, alpha=alpha, sigma=sigma)
    with pytest.raises(ConfigError, match="--target"):
        verify([3.0, 3.1], math.nan)


def run_folder(path: Path, loss: float | None, **changes: Any) -> Path:
    path.mkdir()
    summary = {"val_loss": loss, "steps": 10, "recipe": "modern", "seed": 0, "target": 3.28}
    (path / "summary.json").write_text(json.dumps(summary | changes))
    return path


def test_runs_through_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = [3.270, 3.272, 3.274, 3.271]
    runs = [run_folder(tmp_path / f"{i}", loss, seed=i) for i, loss in enumerate(losses)]
    assert verify_command(runs, 3.28, 0.01, None, None, True) == 0
    found = json.loads(capsys.readouterr().out)
    expected = reference.ttest_1samp(losses, 3.28, alternative="less")
    assert set(found) >= {"n", "mean", "std", "t", "p", "holds"}
    assert found["n"] == 4
    assert found["std"] == pytest.approx(np.std(losses, ddof=1))
    assert found["p"] == pytest.approx(expected.pvalue)
    assert found["holds"] is True
    assert verify_command(runs, 3.2, 0.01, None, None, False) == 1
    assert "does not hold: mean below 3.2" in capsys.readouterr().out
    assert verify_command(runs, None, 0.01, None, None, False) == 0  # the runs' own target


def test_notes_on_what_misleads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run_folder(tmp_path / "a", 3.27)
    second = run_folder(tmp_path / "b", 3.26, steps=9)
    third = run_folder(tmp_path / "c", 3.25, recipe="other")
    verify_command([first, second, third], 3.28, 0.01, None, None, False)
    shown = capsys.readouterr().out
    for words in ("different recipes: modern, other", "different steps", "share a seed"):
        assert words in shown
    assert "by construction" not in shown
    (first / "config.toml").write_text(
        to_toml(resolve("modern", "nano", ["train.stop=target"]).config)
    )
    verify_command([first, second, third], 3.28, 0.01, None, None, False)
    assert "by construction" in capsys.readouterr().out


def test_a_run_that_diverged_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_folder(tmp_path / f"{i}", 3.27, seed=i) for i in range(3)]
    runs.append(run_folder(tmp_path / "ill", None, seed=3))  # NaN is null in a summary
    assert verify_command(runs, 3.28, 0.01, None, None, True) == 1
    assert json.loads(capsys.readouterr().out)["n"] == 4


def test_command_misuse(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "a", 3.27)
    early = run_folder(tmp_path / "early", 3.27, stopped_early=True)
    (tmp_path / "file.csv").write_text("3.1\n")
    cases: list[tuple[list[Path], float | None, Path | None, str]] = [
        ([], 3.28, None, "either run folders or --losses"),
        ([run], 3.28, tmp_path / "file.csv", "not both"),
        ([], None, tmp_path / "file.csv", "--target is needed"),
        ([run, tmp_path / "." / "a"], 3.28, None, "given twice"),
        ([tmp_path], 3.28, None, "not a run folder"),
        ([early], 3.28, None, "stopped before its end"),
    ]
    for runs, target, losses, sentence in cases:
        with pytest.raises(ConfigError, match=sentence) as caught:
            verify_command(runs, target, 0.01, losses, None, False)
        assert caught.value.exit_code == 2
