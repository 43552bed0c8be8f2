"""`--until`: when a race or an ablation that adds seeds one at a time may stop.

It always stops when everything is decided; a time and a number of seeds are limits besides.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from speedrun.errors import ConfigError, quoted
from speedrun.train.request import MOST_DIGITS, UNITS


@dataclass(frozen=True)
class Until:
    text: str = "decided"
    seconds: float | None = None
    seeds: int | None = None
    begun: float = field(default_factory=time.monotonic, compare=False)

    @staticmethod
    def parse(words: Sequence[str]) -> Until | None:
        """`decided`, a time (`2h`) or a number of seeds (`12 seeds`); several of them: the first.

        None: not asked for.
        """
        if not words:
            return None
        seconds: list[float] = []
        seeds: list[int] = []
        number = rf"[0-9]{{1,{MOST_DIGITS}}}"
        for word in words:
            if found := re.fullmatch(rf"({number}(?:\.[0-9]+)?)([smh])", word.strip()):
                seconds.append(float(found[1]) * UNITS[found[2]])
            elif found := re.fullmatch(rf"({number})(?: *seeds?)?", word.strip()):
                seeds.append(int(found[1]))
            elif word.strip() != "decided":
                raise ConfigError(
                    f"--until {quoted(word)} cannot be used: write decided, a time such as 2h or "
                    "30m, or "
                    "a number of seeds such as '12 seeds'"
                )
        if seeds and min(seeds) < 2:
            raise ConfigError(f"--until {min(seeds)} seeds cannot be used: pairs need at least 2")
        if seconds and min(seconds) <= 0:
            raise ConfigError("--until cannot be used with a time of 0: no run would be made")
        return Until(" or ".join(words), min(seconds, default=None), min(seeds, default=None))

    def each_of(self, parts: int) -> Until:
        """The time shared out evenly; seeds are counted in each part anew."""
        return self if self.seconds is None else replace(self, seconds=self.seconds / parts)

    def from_now(self) -> Until:
        return replace(self, begun=time.monotonic())

    @property
    def deadline(self) -> float | None:
        """By the clock of `time.monotonic`."""
        return None if self.seconds is None else self.begun + self.seconds

    @property
    def over(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline
