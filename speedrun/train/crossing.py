"""Where a validation curve crosses the target, and when to look again so as to see it.

A run is validated at some steps only. The first validation at or below the target says that the
curve crossed between the one before and this one: that is the cell. The crossing is where the
straight line through the two, loss against the logarithm of the step, meets the target (losses fall
about in a straight line over the logarithm of time; from step 0, which has none, the line is over
steps). Seconds follow in proportion to the steps of the cell. The width of the cell goes with the
figure into every interval (`science/stats.py`), for the curve may bend in between.

A fixed distance between validations would make cells wide where it matters. So the same line, drawn
through the last two validations and beyond, says where the target is due, and the next validation
comes there: losses fall ever more slowly, so the line is too early rather than too late, and the
cells shrink towards the crossing. Runs that have a target are also validated twice before the first
regular validation, lest a fast one cross it in a cell that begins at step 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

NEARER = 2 / 3  # of the way to where the target is due


class Look(NamedTuple):
    """One validation; a loss that is not finite is None."""

    step: int
    loss: float | None
    seconds: float
    wall_seconds: float


@dataclass(frozen=True)
class Crossing:
    """What it took to reach the target, and the steps between the validations around it."""

    steps: float
    seconds: float
    wall_seconds: float
    cell: int

    def tokens(self, of_a_step: int) -> int:
        return round(self.steps * of_a_step)


def crossing(before: Look | None, after: Look, target: float) -> Crossing:
    """Of two validations in a row, the second of which is the first at or below the target."""
    if before is None:  # the first of all
        return Crossing(after.step, after.seconds, after.wall_seconds, 0)
    cell = after.step - before.step
    if before.loss is None or after.loss is None or before.loss <= after.loss:
        share = 1.0
    else:
        share = _steps_at(before, after, target) / cell
    return Crossing(
        before.step + share * cell,
        before.seconds + share * (after.seconds - before.seconds),
        before.wall_seconds + share * (after.wall_seconds - before.wall_seconds),
        cell,
    )


def next_look(before: Look | None, last: Look, target: float, every: int) -> int:
    """The step to validate at next: the regular one, or earlier if the target is due before it."""
    regular = next(
        (step for step in (every // 4, every // 2) if step > last.step),
        last.step - last.step % every + every,
    )
    if before is None or before.loss is None or last.loss is None or last.loss <= target:
        return regular
    if last.loss >= before.loss:  # it wavers: no line leads to the target from here
        return min(regular, last.step + 2 * (last.step - before.step))
    due = before.step + _steps_at(before, last, target) - last.step
    # Not all of the way: early in a run losses may still fall faster from look to look.
    return max(last.step + 1, min(regular, last.step + math.ceil(NEARER * due)))


def _steps_at(before: Look, after: Look, target: float) -> float:
    """From `before` to where the line through the two validations meets the target."""
    assert before.loss is not None and after.loss is not None  # noqa: PT018
    share = (before.loss - target) / (before.loss - after.loss)
    if before.step == 0:
        return share * (after.step - before.step)
    exponent = min(share * math.log(after.step / before.step), math.log(1e9))
    return before.step * math.expm1(exponent)
