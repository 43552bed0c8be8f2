"""What `speedrun train` was asked for, as one object from the command line to where each part acts.

`recipe`, `track`, `overrides`, `seed` and `steps` resolve to the config, which alone decides what a
run computes; the rest says how it is carried out. Needs no torch, so the command line can read it
at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from speedrun.errors import ConfigError, quoted

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
MOST_DIGITS = 15  # of a number of steps or seconds


def parse_seconds(text: str, option: str, usable: str = "a time such as 90s, 5m or 1h") -> float:
    found = re.fullmatch(rf"([0-9]{{1,{MOST_DIGITS}}}(?:\.[0-9]+)?)([smh])", text)
    if not found:
        raise ConfigError(f"{option} {quoted(text)} cannot be used: write {usable}")
    return float(found[1]) * UNITS[found[2]]


@dataclass(frozen=True)
class Interval:
    """Between two checkpoints: so many steps, or so many seconds, or neither (no checkpoints)."""

    steps: int | None = None
    seconds: float | None = None

    @staticmethod
    def parse(text: str) -> Interval:
        if not text:
            return Interval()
        if re.fullmatch(rf"0*[1-9][0-9]{{0,{MOST_DIGITS - 1}}}", text):
            return Interval(steps=int(text))
        usable = "steps (50) or a time (5m)"
        return Interval(seconds=parse_seconds(text, "--checkpoint-every", usable))

    def __str__(self) -> str:
        return f"{self.seconds:f}s" if self.seconds is not None else str(self.steps or "")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The words of `speedrun train`, read."""

    recipe: str = ""
    overrides: Sequence[str] = ()
    track: str = "nano"
    folder: Path | None = None  # None: a new one below runs/
    seed: int | None = None
    steps: int | None = None
    resume: bool = False
    force: bool = False  # resume although code, data or config differ
    dry_run: bool = False
    sample_tokens: int = 120
    checkpoint_every: Interval = Interval()
    keep: int = 2
    time_limit: float | None = None  # seconds
    stop_after: int | None = None  # steps, of the schedules of the full length
    log: tuple[str, ...] = ()
    ranks: int = 0  # 0: this process, or the ranks that torchrun has started
    max_restarts: int = 0
    warm_up: bool = True  # a pass over made-up tokens before the clock starts

    def words_of_a_rank(self, folder: Path) -> list[str]:
        """The command line of one rank of this request, training into `folder`."""
        words = ["train", *filter(None, [self.recipe]), *self.overrides]
        if not self.resume:
            words += ["--track", self.track]
        options = {
            "--run": folder,
            "--seed": self.seed,
            "--steps": self.steps,
            "--checkpoint-every": str(self.checkpoint_every) or None,
            "--keep": self.keep,
            "--time-limit": None if self.time_limit is None else f"{self.time_limit:f}s",
            "--stop-after": self.stop_after,
            "--sample-tokens": self.sample_tokens,
        }
        for option, value in options.items():
            if value is not None:
                words += [option, str(value)]
        for sink in self.log:
            words += ["--log", sink]
        flags = {"--resume": self.resume, "--force": self.force}
        return words + [flag for flag, given in flags.items() if given]
