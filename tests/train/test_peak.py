"""Shares of peak: each stretch of steps against peaks measured beside it, at a stated cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speedrun.train.log import Peak
from speedrun.train.progress import Progress
from speedrun.train.run import RunFolder
from speedrun.train.trainer import Trainer
from tests.train.heard import ALONE, Heard, Make, quiet_log, train, values
from tests.train.heard import step as one_step


class Rows:
    """A log's sink that keeps what it is told."""

    def __init__(self) -> None:
        self.kept: dict[str, list[dict[str, Any]]] = {}

    def log(self, kind: str, **values: Any) -> None:
        self.kept.setdefault(kind, []).append(values)


def test_a_stretch_counts_with_the_peaks_at_its_ends(tiny: Make) -> None:
    config, rows, progress = tiny(), Rows(), Progress()
    log = quiet_log(config, rows)  # a step is as many FLOPs as a batch has tokens
    work = float(config.batch.tokens)
    trainer = Trainer(config, ALONE, Path(config.data.dir))
    with trainer.loader:
        outcome = one_step(trainer)

    def step(seconds: float) -> None:
        progress.step += 1
        progress.seconds += seconds
        log.step(progress, outcome)

    step(2.0)
    log.peak(progress, Peak(work, 0.25))
    step(2.0)
    step(4.0)
    log.peak(progress, Peak(work / 2, 0.5))  # the machine has slowed down
    step(4.0)
    steps = [row["peak_share"] for row in rows.kept["train"]]
    assert steps == pytest.approx([None, 1 / 2, 2 / 6, 2 / 4])
    peaks = rows.kept["peak"]
    assert [row["peak_flops"] for row in peaks] == [work, work / 2]
    # Two steps in six seconds at three quarters of the first peak.
    assert [row["peak_share"] for row in peaks] == pytest.approx([1 / 2, 2 / (6 * 0.75)])
    assert progress.peak_share == pytest.approx(3 / (2 + 6 * 0.75))
    assert progress.peak_seconds == 0.75


def test_a_run_measures_its_peak_at_each_validation_and_states_the_cost(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "measure_peak", lambda _: Peak(1e5, 0.5))
    summary = train(tiny("validation.every=4"), tmp_path / "run")
    assert values(tmp_path / "run", "peak") == [1, 4, 8]
    (end,) = RunFolder(tmp_path / "run").read_metrics("end")
    assert end["peak_seconds"] == summary.peak_seconds == 1.5
    assert summary.peak_share is not None
    seconds = values(tmp_path / "run", "train", "seconds")
    flops = summary.peak_share * 1e5 * seconds[-1]
    each = RunFolder(tmp_path / "run").read_metrics("peak")[0]["peak_share"] * 1e5 * seconds[0]
    assert flops == pytest.approx(8 * each, rel=1e-3)


def test_a_peak_that_would_cost_more_than_it_tells_is_left_out(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "measure_peak", lambda _: Peak(1e15, 0.5))
    train(tiny("validation.every=2"), tmp_path / "run")
    assert values(tmp_path / "run", "peak") == [1, 8]  # after the first step and the last


def test_a_resumed_run_keeps_what_was_measured(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "measure_peak", lambda _: Peak(1e5, 0.5))
    config = tiny("validation.every=4")
    cut = train(config, tmp_path / "run", Heard(at_step=4))
    assert cut.peak_seconds == 1.0  # the stop is heard at the validation, where a peak was taken
    whole = train(config, tmp_path / "run", resume=True)
    assert whole.peak_seconds == 1.5
    assert values(tmp_path / "run", "peak") == [1, 4, 8]


def test_the_peak_is_measured(tiny: Make) -> None:
    config = tiny()
    trainer = Trainer(config, ALONE, Path(config.data.dir))
    with trainer.loader:
        peak = trainer.measure_peak()
    assert peak.flops > 0
    assert peak.seconds > 0
