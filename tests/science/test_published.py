"""The shipped table of published curves against the figures known of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from speedrun.config.resolve import resolve
from speedrun.science.published import compare, curves, record_of, set_otherwise, spread_at


def test_every_record_with_a_log_is_there() -> None:
    assert sorted(curves()) == list(range(4, 19))
    steps = {4: 6200, 9: 3200, 12: 1875, 13: 1750, 14: 1530, 15: 1480, 16: 1480, 17: 1490, 18: 1390}
    assert {record: curves()[record].steps for record in steps} == steps


@pytest.mark.parametrize(
    ("record", "step", "mean", "std"),
    [
        (15, 125, 4.4161, 0.0086),
        (15, 750, 3.5503, 0.0029),
        (16, 1480, 3.2785, 0.0024),
        (16, 500, 3.6868, 0.0037),
        (14, 1250, 3.3538, None),
    ],
)
def test_points(record: int, step: int, mean: float, std: float | None) -> None:
    point = next(point for point in curves()[record].points if point.step == step)
    assert point.mean == pytest.approx(mean, abs=6e-5)
    if std is not None:
        assert point.std == pytest.approx(std, abs=6e-5)


def test_times_and_the_untrained_loss() -> None:
    assert curves()[15].points[-1].seconds == pytest.approx(236.87, abs=0.01)
    assert curves()[18].points[0].mean == pytest.approx(math.log(50304), abs=1e-4)


def test_which_runs_have_a_published_curve() -> None:
    assert record_of("record-16", "small") == 16
    assert record_of("record-16", "nano") is None
    assert record_of("record-02", "small") is None  # no log with validation steps exists
    assert record_of("best", "small") is None


def test_every_record_is_itself_wherever_it_is_run() -> None:
    place = (
        "train.seed=3", "machine.threads=2", "machine.device=cpu", "machine.precision=fp32",
        "machine.compile=none", "train.stop=target", "train.target=3.3", "train.steps=100",
        "data.dir=/elsewhere", "machine.microbatch=1", "machine.attention=dense",
        "validation.every=50",
    )  # fmt: skip
    for record in curves():
        for overrides in ((), place):
            config = resolve(f"record-{record:02d}", "small", overrides).config
            assert set_otherwise(config, record) == []


def test_a_name_is_not_taken_for_the_record(tmp_path: Path) -> None:
    changed = resolve("record-18", "small", ["batch.tokens=65536", "model.softcap=30.0"]).config
    assert set_otherwise(changed, 18) == ["model.softcap", "batch.tokens"]
    file = tmp_path / "record-18.toml"
    file.write_text('extends = "record-17"\n')
    config = resolve(str(file), "small").config
    assert record_of(config.recipe, config.track) == 18
    assert "schedule.steps" in set_otherwise(config, 18)
    unplaced = resolve("record-18", "small", ["data.dir="]).config
    assert set_otherwise(unplaced, 18) == ["data.dir"]


def test_difference_in_standard_deviations() -> None:
    found = compare(16, [(0, 10.8258), (125, 4.4164 + 0.0116), (130, 4.0), (1480, 3.28)])
    assert [row.step for row in found] == [0, 125, 1480]
    assert found[0].deviations is None  # all runs start from ln V: no spread
    assert found[1].deviations == pytest.approx(1.0, abs=0.02)
    assert found[2].deviations == pytest.approx((3.28 - 3.2785) / 0.0024, abs=0.05)


def test_a_single_log_borrows_its_neighbours_spread() -> None:
    assert curves()[18].points[-1].std is None
    assert spread_at(18, 1390) == spread_at(16, 1480)
    assert spread_at(18, 500) == spread_at(16, 500)
    assert spread_at(9, 3200) is None
