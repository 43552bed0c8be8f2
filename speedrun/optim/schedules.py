"""Schedules as pure functions of the step.

No object holds a schedule and nothing counts calls, so a resumed run needs only its step.
Steps are counted from 0. `step == total` is the state after the last update, where the last
validation takes place. The defaults are those of the speedrun records 13 to 18.
The windows are worked out in integers: a switch falls on its exact step, at any length of run.
"""

import math

from speedrun.optim.errors import OptimError


def trapezoid(
    step: int, total: int, *, warmup: int = 0, cooldown: int, floor: float = 0.0
) -> float:
    """Multiplier that rises over `warmup` steps, stays at 1, and falls over `cooldown` steps.

    Warmup step s has (s+1)/warmup, decay step s has (total-s)/cooldown: neither the first nor the
    last step is wasted on a rate of zero. The decay stops at `floor`.
    """
    _check(step, total, warmup, floor)
    if cooldown < 0 or warmup + cooldown > total:
        raise OptimError(
            f"cooldown is {cooldown}, but warmup ({warmup}) and cooldown must fit "
            f"into the {total} steps of the run and not be negative; shorten one of them"
        )
    if step < warmup:
        return (step + 1) / warmup
    if step <= total - cooldown and step < total:
        return 1.0
    return max(floor, (total - step) / cooldown if step < total else 0.0)


def cosine(step: int, total: int, *, warmup: int = 0, floor: float = 0.0) -> float:
    """Multiplier that rises over `warmup` steps, then falls from 1 to `floor` as half a cosine."""
    _check(step, total, warmup, floor)
    if step < warmup:
        return (step + 1) / warmup
    if step >= total:
        return floor
    done = (step - warmup) / (total - warmup)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))


def momentum(step: int, *, start: float = 0.85, end: float = 0.95, warmup: int = 300) -> float:
    """Muon's momentum: from `start` to `end` in a straight line over `warmup` steps, then `end`."""
    if step < 0 or warmup < 0:
        raise OptimError(f"step ({step}) and warmup ({warmup}) must not be negative")
    if step >= warmup:
        return end
    return start + (end - start) * (step / warmup)


def window_tokens(
    step: int, total: int, *, start: int = 64, end: int = 1792, unit: int = 64
) -> int:
    """Attention window in tokens, a multiple of `unit` (records 13 to 15)."""
    return unit * _ramp(step, total, start, end, unit)


def window_blocks(
    step: int, total: int, *, start: int = 128, end: int = 1856, block: int = 128
) -> int:
    """Attention window in blocks, the block of the query included (records 16 to 18)."""
    return _ramp(step, total, start, end, block)


def _ramp(step: int, total: int, start: int, end: int, unit: int) -> int:
    """How many whole units fit into start + (end - start) * step / total."""
    if step < 0 or total < 1 or not 1 <= unit <= start <= end:
        raise OptimError(
            f"a window needs 0 <= step, 1 <= total and 1 <= unit <= start <= end, "
            f"but step={step}, total={total}, unit={unit}, start={start}, end={end}"
        )
    return (start * total + (end - start) * min(step, total)) // (unit * total)


def _check(step: int, total: int, warmup: int, floor: float) -> None:
    if step < 0 or total < 1:
        raise OptimError(f"step ({step}) must be 0 or more and total ({total}) 1 or more")
    if not 0 <= warmup <= total:
        raise OptimError(f"warmup is {warmup}, but it must lie between 0 and {total}, the total")
    if not 0.0 <= floor <= 1.0:
        raise OptimError(f"floor is {floor}, but it is a multiplier between 0 and 1")
