"""Rivals take turns, and what warms up does not count."""

from __future__ import annotations

import pytest

from speedrun.bench.timing import take_turns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("speedrun.bench.timing.time.perf_counter", lambda: now[0])
    return now


def test_rivals_take_turns_and_quick_ones_run_more_often(clock: list[float]) -> None:
    calls: list[str] = []
    seconds = {"slow": iter([100.0, 3.0, 5.0, 4.0]), "quick": iter([50.0] * 2 + [1.0] * 6)}

    def rival(name: str) -> None:
        calls.append(name)
        clock[0] += next(seconds[name])

    found = take_turns(
        {name: lambda name=name: rival(name) for name in seconds},  # type: ignore[misc]
        3,
        times_per_turn={"quick": 2},
    )
    assert found == {"slow": 4.0, "quick": 1.0}  # medians without the first turn
    turns = [sorted(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert turns == [["quick", "quick", "slow"]] * 4


def test_the_summary_is_the_callers_choice(clock: list[float]) -> None:
    times = iter([9.0, 9.0, 2.0, 5.0, 8.0])

    def rival() -> None:
        clock[0] += next(times)

    assert take_turns({"it": rival}, 3, warm_up=2, summary=min) == {"it": 2.0}
