"""Every value that changes over a run, as pure functions of the step.

`settings_at(config, step)` is the one place where a schedule is read: the trainer applies it, a
resumed run compares it with what the steps already done were given, and the page draws it. A new
scheduled value is a field of `Settings`. Nothing counts calls, so a resumed run needs only its
step. Steps are counted from 0; `step == total` is the state after the last update, where the last
validation takes place. Windows are worked out in integers: a change falls on its exact step, at any
length of run. The defaults are those of the speedrun records 13 to 18.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from speedrun.config.schema import BLOCK, TOKEN_UNIT, Config
from speedrun.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """What one step is trained with, as against the config, which holds for all of them."""

    learning_rate_multiplier: float  # of every peak rate
    momentum: float  # Muon's
    window: int | None  # in attention.window's own unit, tokens or blocks; None: no window


def settings_at(config: Config, step: int) -> Settings:
    return Settings(
        learning_rate_multiplier=_learning_rate_multiplier(config, step),
        momentum=_momentum(config, step),
        window=_window(config, step),
    )


def _learning_rate_multiplier(config: Config, step: int) -> float:
    warmup = config.scaled(config.schedule.warmup)
    floor = config.schedule.floor
    if config.schedule.shape == "cosine":
        return cosine(step, config.steps, warmup=warmup, floor=floor)
    cooldown = min(config.scaled(config.schedule.cooldown), config.steps - warmup)
    return trapezoid(step, config.steps, warmup=warmup, cooldown=cooldown, floor=floor)


def _momentum(config: Config, step: int) -> float:
    muon, warmup = config.optimizer.muon, config.scaled(config.schedule.momentum_warmup)
    return momentum(step, start=muon.momentum_start, end=muon.momentum, warmup=warmup)


def _window(config: Config, step: int) -> int | None:
    """In tokens a multiple of 64 (records 13 to 15), in blocks with the query's (16 to 18)."""
    attention, total = config.attention, config.steps
    if attention.window == "none":
        return None
    unit = BLOCK if attention.window == "blocks" else TOKEN_UNIT
    start, end = max(attention.window_start, unit), max(attention.window_end, unit)
    # How many whole units fit into start + (end - start) * step / total.
    units = (start * total + (end - start) * min(step, total)) // (unit * total)
    return units if attention.window == "blocks" else unit * units


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


def momentum(step: int, *, start: float = 0.85, end: float = 0.95, warmup: int = 300) -> float:
    """Muon's momentum: from `start` to `end` in a straight line over `warmup` steps, then `end`."""
    if step < 0 or warmup < 0:
        raise ConfigError(
            f"step ({step}) and warmup ({warmup}) must not be negative: use 0 or more"
        )
    if step >= warmup:
        return end
    return start + (end - start) * (step / warmup)


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
