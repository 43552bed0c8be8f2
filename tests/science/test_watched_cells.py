"""Watched decisions on figures that are known to a cell alone, as crossings are."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speedrun.science import sequential
from tests.science.test_bets import ALPHA
from tests.science.test_sequential import spread_out


@settings(max_examples=60, deadline=None)
@given(spread_out, st.integers(0, 1000), st.integers(-100, 100))
def test_cells_are_bet_against_at_every_share(
    differences: list[float], size: int, percent: int
) -> None:
    """Wherever the figures lie within their cells, by a share that they have in common."""
    cells = [size / 500 * (1 + (i % 3)) for i in range(len(differences))]
    within = [d + percent / 100 * cell for d, cell in zip(differences, cells, strict=True)]
    look = sequential.watch(differences, ALPHA, 1.5, cells=cells)[-1]
    exact = sequential.watch(within, ALPHA, 1.5)[-1]
    assert look.p >= exact.p * (1 - 1e-9)
    assert (look.p_equal or 0) >= (exact.p_equal or 0) * (1 - 1e-9)
    if not look.interval.empty and not exact.interval.empty and look.interval.low is not None:
        assert look.interval.low <= (exact.interval.low or 0) + 1e-6
        assert (look.interval.high or 0) >= (exact.interval.high or 0) - 1e-6


def test_figures_on_a_grid_have_an_interval_of_its_width() -> None:
    found = sequential.decide({"a": [math.log(2)] * 8}, margin=None, cells={"a": [0.1] * 8})["a"]
    assert found.low == pytest.approx(math.log(2) - 0.1)
    assert found.high == pytest.approx(math.log(2) + 0.1)
    assert found.verdict == "helps"
    near = {"a": [0.05 + 0.001 * (i % 3) for i in range(12)]}
    open_ = sequential.decide(near, margin=0.08, cells={"a": [0.1] * 12})["a"]
    assert (open_.verdict, open_.note) == ("undecided", sequential.COARSE)
    sure = {"a": [0.2 + 0.001 * (i % 3) for i in range(12)]}
    shown = sequential.decide(sure, margin=0.08, cells={"a": [0.1] * 12})["a"]
    assert (shown.verdict, shown.note) == ("helps", "")
    fine = sequential.decide(near, margin=0.08, cells={"a": [0.01] * 12})["a"]
    assert (fine.verdict, fine.within_margin, fine.note) == ("helps", True, "")
