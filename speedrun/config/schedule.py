"""Every value that changes over a run, as pure functions of the step.

`settings_at(config, step)` is the one place where a schedule is read: the trainer applies it, a
resumed run compares it with what the steps already done were given, and the page draws it. A new
scheduled value is a field of `Settings`. Nothing counts calls, so a resumed run needs only its
step. Steps are counted from 0; `step == total` is the state after the last update, where the last
validation takes place. Windows are worked out in integers: a change falls on its exact step, at any
length of run. The defaults are those of the speedrun records 13 to 18.

`custom.schedule` names a function of a user's own in place of the learning rate's: of the step, the
steps of the run and its arguments, f(step, total, **args), a number that is 0 or more. It is asked
again by whoever resumes or checks a run, so it must give the same then.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

from speedrun.config.architecture import BLOCK, TOKEN_UNIT
from speedrun.config.calling import call
from speedrun.config.code import UsedCode, load
from speedrun.config.schema import Config
from speedrun.errors import ConfigError, quoted


@dataclass(frozen=True)
class Settings:
    """What one step is trained with, as against the config, which holds for all of them."""

    learning_rate_multiplier: float  # of every peak rate
    momentum: float  # Muon's
    window: int | None  # in attention.window's own unit, tokens or blocks; None: no window


def settings_at(config: Config, step: int) -> Settings:
    return Settings(
        learning_rate_multiplier=_learning_rate_multiplier(config, step),
        momentum=momentum_at(config, step),
        window=window_at(config, step),
    )


def _learning_rate_multiplier(config: Config, step: int) -> float:
    if config.custom.schedule.use:
        return _own_multiplier(config.custom.schedule, step, config.steps)
    warmup = config.scaled(config.schedule.warmup)
    floor = config.schedule.floor
    if config.schedule.shape == "cosine":
        return cosine(step, config.steps, warmup=warmup, floor=floor)
    cooldown = min(config.scaled(config.schedule.cooldown), config.steps - warmup)
    return trapezoid(step, config.steps, warmup=warmup, cooldown=cooldown, floor=floor)


def momentum_at(config: Config, step: int) -> float:
    muon, schedule = config.optimizer.muon, config.schedule
    return momentum(
        step,
        start=muon.momentum_start,
        end=muon.momentum,
        warmup=config.scaled(schedule.momentum_warmup),
        total=config.steps,
        cooldown=config.scaled(schedule.momentum_cooldown),
    )


def window_at(config: Config, step: int) -> int | None:
    """In tokens a multiple of 64 (records 13 to 15), in blocks with the query's (16 to 18)."""
    attention, total = config.attention, config.steps
    if attention.window == "none":
        return None
    unit = BLOCK if attention.window == "blocks" else TOKEN_UNIT
    start, end = max(attention.window_start, unit), max(attention.window_end, unit)
    # How many whole units fit into start + (end - start) * step / total.
    units = (start * total + (end - start) * min(step, total)) // (unit * total)
    return units if attention.window == "blocks" else unit * units


MOST_TRIED = 10_000  # steps at which a schedule of one's own is asked beforehand


def try_schedule(config: Config) -> None:
    """Refuse a function of a user's own that fails at some step, or gives other values later."""
    if not config.custom.schedule.use:
        return
    steps = range(0, config.steps + 1, 1 + config.steps // MOST_TRIED)
    first = [_learning_rate_multiplier(config, step) for step in steps]
    for step, before in reversed([*zip(steps, first, strict=True)]):
        if (now := _learning_rate_multiplier(config, step)) != before:
            raise ConfigError(
                f"custom.schedule ({config.custom.schedule.use}) gives {before} at step {step} and "
                f"{now} when asked again: it must follow from step, total and args alone, for "
                "resumed runs ask it anew"
            )


def _own_multiplier(used: UsedCode, step: int, total: int) -> float:
    function = _function(used.use, used.code, used.place)
    when = f"at step {step} of {total}"
    value = call("custom.schedule", used, function, step, total, doing=when)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= sys.float_info.max:
        raise ConfigError(
            f"custom.schedule ({used.use}) gives {quoted(value)} {when}: the multiplier of the "
            "learning rates is a number that is finite and 0 or more"
        )
    return float(value)


@cache
def _function(use: str, code: str, place: str) -> Any:
    """Looked up once, for it is asked at every step."""
    return load(UsedCode(use=use, code=code, place=place))


def trapezoid(
    step: int, total: int, *, warmup: int = 0, cooldown: int, floor: float = 0.0
) -> float:
    """Multiplier that rises over `warmup` steps, stays at 1, and falls over `cooldown` steps.

    Warmup step s has (s+1)/warmup, decay step s has (total-s)/cooldown: neither the first nor the
    last step is wasted on a rate of zero. The decay stops at `floor`.
    """
    _check(step, total, warmup, cooldown, floor)
    if step < warmup:
        return (step + 1) / warmup
    if step <= total - cooldown and step < total:
        return 1.0
    return max(floor, (total - step) / cooldown if step < total else 0.0)


def cosine(step: int, total: int, *, warmup: int = 0, floor: float = 0.0) -> float:
    """Multiplier that rises over `warmup` steps, then falls from 1 to `floor` as half a cosine."""
    _check(step, total, warmup, 0, floor)
    if step < warmup:
        return (step + 1) / warmup
    if step >= total:
        return floor
    done = (step - warmup) / (total - warmup)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))


def momentum(
    step: int,
    *,
    start: float = 0.85,
    end: float = 0.95,
    warmup: int = 300,
    total: int = 0,
    cooldown: int = 0,
) -> float:
    """Muon's momentum: from `start` to `end` in a straight line over `warmup` steps, then `end`.

    Over the last `cooldown` steps of `total` it goes back to `start`.
    """
    if min(step, warmup, cooldown) < 0:
        raise ConfigError(
            f"step ({step}), warmup ({warmup}) and cooldown ({cooldown}) must not be negative: "
            "use 0 or more"
        )
    share = step / warmup if step < warmup else 1.0
    if cooldown and total - step < cooldown:
        share = min(share, max(total - step, 0) / cooldown)
    return end if share == 1.0 else start + (end - start) * share


def _check(step: int, total: int, warmup: int, cooldown: int, floor: float) -> None:
    if step < 0 or total < 1:
        raise ConfigError(f"step ({step}) must be 0 or more, and total ({total}) 1 or more")
    if warmup < 0 or cooldown < 0 or warmup + cooldown > total:
        raise ConfigError(
            f"warmup ({warmup}) and cooldown ({cooldown}) must fit into the {total} steps of the "
            f"run and not be negative; shorten one of them"
        )
    if not 0.0 <= floor <= 1.0:
        raise ConfigError(f"floor is {floor}, but it is a multiplier between 0 and 1")
