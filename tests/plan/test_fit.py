"""Predictions against the published runs, each by a fit that has not seen it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from speedrun.config.resolve import resolve
from speedrun.data.shards import PUBLIC_VOCAB
from speedrun.plan.chips import Node
from speedrun.plan.fit import fit, measured, systems_of
from speedrun.plan.predict import fitted, plan
from speedrun.science.published import curves
from speedrun.train.estimate import without_storage
from speedrun.train.memory import MIB, memory_of_step

# The most that records allocated, as their logs print it: 16 in the mean of 40, 17 and 18 in one.
PEAK_MIB = {16: 34_239, 17: 31_361, 18: 31_563}


@cache
def found() -> dict[str, Any]:
    return fit()


def test_the_shares_of_the_package_follow_from_the_published_runs() -> None:
    """After a change of the counts:  python -m speedrun.plan.fit"""
    now, stored = found(), fitted()
    assert stored.reached == pytest.approx(now["reached"], rel=1e-3)
    for record, pair in now["left_out_ms"].items():
        assert stored.left_out[record] == pytest.approx(pair, rel=1e-3)


@pytest.mark.parametrize("record", range(4, 19))
def test_a_record_that_was_left_out_is_predicted_within_a_tenth(record: int) -> None:
    real, predicted = found()["left_out_ms"][record]
    assert real == pytest.approx(1000 * measured()[record])
    assert predicted == pytest.approx(real, rel=0.10)


def test_what_is_left_out_is_not_used() -> None:
    without = fit([12])
    assert without["reached"] != found()["reached"]
    assert 12 not in without["fitted_ms"]
    assert without["left_out_ms"][12][1] == pytest.approx(found()["left_out_ms"][12][1])


def test_shares_are_shares() -> None:
    for limit, share in fitted().reached.items():
        assert limit == "steps" or 0 < share < 1, limit


@pytest.mark.parametrize("record", [15, 17, 18])
def test_steps_grow_with_the_window_as_published(record: int) -> None:
    """The first 125 steps and the last whole stretch; what was fitted are means of runs.

    The growth itself is predicted too large, up to 1.6 times: what attention waits for at the
    smallest window is not counted. Record 16's machine stood still for half a second some five
    times in the first stretch.
    """
    points = [point for point in curves()[record].points if point.step % 125 == 0]
    late = (points[-1].seconds - points[-2].seconds) / 125
    early = points[1].seconds / (125 - 10)
    config = resolve(f"record-{record}", "small").config
    found = plan(config, PUBLIC_VOCAB, Node.parse("8xH100"))
    assert found.first_step == pytest.approx(early, rel=0.10)
    assert found.last_step == pytest.approx(late, rel=0.10)


@pytest.mark.parametrize("record", PEAK_MIB)
def test_memory_is_within_a_tenth_of_the_published_peak(record: int) -> None:
    config = resolve(f"record-{record}", "small").config
    model = without_storage(config, PUBLIC_VOCAB)
    found = memory_of_step(config, model, systems_of(record), 1)
    assert sum(found.values()) / MIB == pytest.approx(PEAK_MIB[record], rel=0.10)


def test_the_document_has_these_figures() -> None:
    page = (Path(__file__).parents[2] / "docs/plan.md").read_text()
    for record, (real, predicted) in fitted().left_out.items():
        assert f"| {record} | {real:.1f} | {predicted:.1f} | {predicted / real - 1:+.1%} |" in page
    text = " ".join(page.split())
    share = fitted().reached
    for said in (
        f"products {share['products']:.0%},", f"rows {share['attention']:.0%} and",
        f"windows {share['masked']:.0%},", f"memory {share['memory']:.0%},",
        f"orthogonalisation {share['orthogonal']:.1%},", f"link {share['link']:.0%},",
        f"{1000 / share['steps']:.1f} ms a pass",
    ):  # fmt: skip
        assert said in text
