"""Rivals timed side by side: they take turns in one process, so that a slow minute slows all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from random import Random
from statistics import median

Figures = dict[str, float | str]


def seconds_of(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def take_turns(
    rivals: Mapping[str, Callable[[], object]],
    turns: int,
    *,
    warm_up: int = 1,
    times_per_turn: Mapping[str, int] | None = None,
    summary: Callable[[list[float]], float] = median,
) -> dict[str, float]:
    """Seconds of each rival over its runs, after `warm_up` turns that do not count.

    In another order each turn: what comes after a run on the same data finds it in the cache. A
    quick rival may run several times a turn.
    """
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    order, random = list(rivals), Random(0)
    for turn in range(warm_up + turns):
        random.shuffle(order)
        for name in order:
            for _ in range((times_per_turn or {}).get(name, 1)):
                taken = seconds_of(rivals[name])
                if turn >= warm_up:
                    seconds[name].append(taken)
    return {name: summary(taken) for name, taken in seconds.items()}
