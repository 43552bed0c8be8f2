"""Crossings: on the line between two validations, in their cell; looks that close in on it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedrun.train.crossing import Crossing, Look, crossing, next_look


def look(step: int, loss: float | None) -> Look:
    return Look(step, loss, 2.0 * step, 3.0 * step + 1)


def test_a_crossing_lies_on_the_line_over_log_steps() -> None:
    found = crossing(look(10, 5.0), look(40, 4.0), 4.5)
    assert (found.steps, found.seconds, found.wall_seconds) == pytest.approx((20, 40, 61))
    assert found.cell == 30
    assert found.tokens(8192) == 20 * 8192


def test_from_step_0_the_line_is_over_steps() -> None:
    assert crossing(look(0, 7.0), look(8, 5.0), 6.0).steps == pytest.approx(4.0)


def test_corners() -> None:
    assert crossing(None, look(0, 3.0), 4.0) == Crossing(0, 0.0, 1.0, 0)
    assert crossing(look(4, None), look(8, 3.0), 4.0).steps == 8
    assert crossing(look(4, 5.0), look(8, 4.0), 4.0).steps == pytest.approx(8.0)


losses = st.floats(2.0, 9.0)


@given(st.integers(0, 1000), st.integers(1, 500), losses, losses, losses)
def test_a_crossing_is_in_its_cell(begin: int, cell: int, a: float, b: float, c: float) -> None:
    low, target, high = sorted((a, b, c))
    if target == high:
        return
    found = crossing(look(begin, high), look(begin + cell, low), target)
    assert begin <= found.steps <= begin + cell + 1e-9
    assert found.cell == cell
    assert found.seconds == pytest.approx(2.0 * found.steps)


@given(st.floats(0.1, 2.0), st.floats(0.05, 0.9), st.integers(1, 200))
def test_looks_close_in_on_the_crossing_of_a_power_law(
    drop: float, power: float, every: int
) -> None:
    """Cells around the target are a few steps wide, whatever the distance of regular looks."""

    def curve(step: int) -> float:
        return 3.0 + 5.0 * math.pow(1 + step, -power)

    target = 3.0 + 5.0 * math.exp(-drop)
    before, last = None, look(0, curve(0))
    looks = 1
    while curve(last.step) > target and last.step < 100_000:
        step = next_look(before, last, target, every)
        regular = last.step - last.step % every + every
        assert last.step < step <= regular
        before, last = last, look(step, curve(step))
        looks += step != regular
    if curve(last.step) <= target and before is not None:
        true = (5.0 / (target - 3.0)) ** (1 / power) - 1
        found = crossing(before, last, target)
        assert abs(found.steps - true) <= found.cell
        if last.step > every // 2:  # after the first two looks
            assert found.cell <= max(2, math.ceil(0.25 * last.step))
    assert looks < 25


def test_looks_stay_regular_far_from_the_target() -> None:
    assert next_look(None, look(0, 7.0), 4.0, 32) == 8
    assert next_look(look(0, 7.0), look(8, 6.9), 4.0, 32) == 16
    assert next_look(look(64, 5.0), look(96, 4.9), 4.0, 32) == 128
    assert next_look(look(64, 4.9), look(96, 5.0), 4.0, 32) == 128  # going up
    assert next_look(look(70, 4.1), look(72, 4.11), 4.0, 32) == 76
    assert next_look(look(64, None), look(96, 5.0), 4.0, 32) == 128
    assert next_look(look(64, 4.9), look(70, 3.9), 4.0, 32) == 96  # passed
    assert 96 < next_look(look(64, 5.0), look(96, 4.2), 4.0, 32) < 112
