"""The speedrun's rule on published losses and on corner cases."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from scipy import stats as reference

from speedrun.errors import ConfigError
from speedrun.science.published import curves
from speedrun.science.verify import read_losses, verify

TARGET = 3.28  # of the public race


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


@pytest.mark.parametrize("loss", [3.27, 3.28, 3.29])
def test_equal_losses_prove_nothing(loss: float) -> None:
    """Copies of a run, or losses of too few digits."""
    verdict = verify([loss] * 3, 3.28)
    assert (verdict.holds, verdict.p, verdict.t, verdict.std) == (False, None, None, 0.0)
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
