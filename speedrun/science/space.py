"""The space a tuning searches, what it may cost, and the plain rule by which it is searched.

Trial 0 is the recipe as it stands. All others are points of one quasirandom sequence (`spread`),
which fills a box evenly however many points are taken of it. As long as less than 60% of the budget
is spent, the box is that of all ranges; then it is a third of each range around the best trial so
far, and half of that for the budget's last 15% (`box_size`). What lies over the end of a range is
cut off. Nothing is drawn and nothing is fitted, so the same losses lead to the
same trials, and all who are given the same budget are searched alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, model_validator

from speedrun.config.keys import check_known, is_argument, schema_fields, whole
from speedrun.errors import ConfigError, quoted
from speedrun.train.request import MOST_DIGITS, parse_seconds

EXPLORED = 0.6  # of the budget, in the whole box
FIRST_BOX = 1 / 3  # of each range, from then on
AGAIN = 0.25  # of the budget, after which the box is halved
EDGE = 0.05  # of a range, from its end on, where the best value may well lie outside
DIGITS = 6  # of a value that is tried, so that people can read and write it

Value = int | float
Values = Mapping[str, Value]  # by key


class Range(BaseModel, frozen=True):
    """The values of one key from `low` to `high`; even in their logarithm with `log`.

    Ends that are whole numbers by type make a range of whole numbers.
    """

    key: str
    low: Value
    high: Value
    log: bool = False

    @staticmethod
    def parse(text: str) -> Range:
        """`KEY=LOW..HIGH` or `KEY=LOW..HIGH:log`."""
        key, _, rest = text.partition("=")
        ends, colon, how = rest.partition(":")
        low, dots, high = ends.partition("..")
        try:
            numbers = [_number(end) for end in (low, high)]
        except ValueError:
            numbers = []
        if not key.strip() or not dots or not numbers or (colon and how != "log"):
            raise ConfigError(
                f"--over {quoted(text)} cannot be used: write KEY=LOW..HIGH or "
                "KEY=LOW..HIGH:log, for "
                "example optimizer.head.lr=0.001..0.1:log"
            )
        found = Range(key=key.strip(), low=numbers[0], high=numbers[1], log=how == "log")
        return found if is_argument(found.key) else found.checked()

    @model_validator(mode="after")
    def _check(self) -> Range:
        if not self.low < self.high:
            raise ConfigError(
                f"{self} cannot be searched: {self.low:g} is not below {self.high:g}; swap them"
            )
        if self.log and self.low <= 0:
            raise ConfigError(f"{self} cannot be searched: a logarithm needs a LOW above 0")
        return self

    def checked(self, stated: Mapping[str, Any] | None = None) -> Range:
        """With ends of the type that its key has; refuses keys that are no numbers.

        No schema knows the arguments of a user's own code. What the recipe has for one of them,
        among `stated`, tells; a whole number there with ends that are none is any number.
        """
        check_known(whole(self.key), "--over")
        in_a_list = whole(self.key) != self.key
        if in_a_list and stated is None:
            return self
        if in_a_list or is_argument(self.key):
            kind: Any = self._kind_of((stated or {}).get(self.key))
        else:
            kind = {key: field.annotation for key, field in schema_fields()}[self.key]
        ends = {"low": self.low, "high": self.high}
        if kind is float:
            return self.model_copy(update={end: float(value) for end, value in ends.items()})
        if kind is not int:
            raise ConfigError(
                f"{self} cannot be searched: {self.key} is not a number; choose a key that is one"
            )
        if not all(float(value).is_integer() for value in ends.values()):
            raise ConfigError(
                f"{self} cannot be searched: {self.key} takes whole numbers; give such ends"
            )
        return self.model_copy(update={end: int(value) for end, value in ends.items()})

    def _kind_of(self, value: Any) -> Any:
        if value is None:
            raise ConfigError(
                f"{self} cannot be searched: the recipe does not state {self.key}, from which the "
                "search begins; write the value it has there"
            )
        whole = all(float(end).is_integer() for end in (self.low, self.high))
        return float if type(value) is int and not whole else type(value)

    def value(self, place: float) -> Value:
        """The value at a place, from 0 at the low end to 1 at the high one."""
        low, high = self._scale
        value = low + place * (high - low)
        value = math.exp(value) if self.log else value
        value = round(value) if self._whole else float(f"{value:.{DIGITS}g}")
        return min(max(value, self.low), self.high)

    def place(self, value: Value) -> float:
        """Where a value lies; the nearer end for one outside of the range."""
        low, high = self._scale
        inside = min(max(value, self.low), self.high)
        return ((math.log(inside) if self.log else inside) - low) / (high - low)

    def some_values(self) -> list[Value]:
        """Its ends, and of whole numbers a hundred between them, or all."""
        if not isinstance(self.low, int):
            return [self.low, self.high]
        step = max(1, int(self.high - self.low) // 100)
        return [*range(self.low, int(self.high), step), self.high]

    def at_edge(self, value: Value) -> bool:
        """So near to an end that the best may lie beyond it, or beyond it already."""
        at_end = self._whole and not self.low < value < self.high
        return at_end or not EDGE < self.place(value) < 1 - EDGE

    @property
    def _whole(self) -> bool:
        return isinstance(self.low, int)

    @property
    def _scale(self) -> tuple[float, float]:
        """The ends as they are divided evenly; each whole number has as much room around it."""
        room = 0.5 if self._whole else 0.0
        low, high = self.low - room, self.high + room
        return (math.log(low), math.log(high)) if self.log else (low, high)

    def __str__(self) -> str:
        return f"{self.key}={self.low:g}..{self.high:g}{':log' if self.log else ''}"


def _number(text: str) -> Value:
    value = float(text)
    if not math.isfinite(value) or not text.isascii():  # a number of 400 digits, or digits as in ²
        raise ValueError
    return int(text) if re.fullmatch(r"\s*[+-]?[0-9]+\s*", text) else value


class Budget(BaseModel, frozen=True):
    """What a search may cost: so many trials, the recipe as it stands included, or so long."""

    trials: int | None = None
    seconds: float | None = None

    @staticmethod
    def parse(text: str) -> Budget:
        if re.fullmatch(rf"[0-9]{{1,{MOST_DIGITS}}}", text):
            return Budget(trials=int(text))
        usable = "a number of trials (12) or a time (30m, 2h)"
        return Budget(seconds=parse_seconds(text, "--budget", usable))

    @model_validator(mode="after")
    def _check(self) -> Budget:
        if (self.trials is None) == (self.seconds is None):
            raise ConfigError("a budget is a number of trials or a time, and one of both")
        if self.trials is not None and self.trials < 2:
            raise ConfigError(
                f"a budget of {self.trials} cannot be used: the first trial is the recipe as it "
                "stands, so 2 at least"
            )
        if self.seconds is not None and self.seconds <= 0:
            raise ConfigError("a budget of no time cannot be used: give 30m, say")
        return self

    def spent(self, trials: int, seconds: float) -> float:
        """Which share is gone after so many trials and seconds; all of it at 1 and above."""
        if self.seconds is not None:
            return seconds / self.seconds
        assert self.trials is not None
        return max(0, trials - 1) / (self.trials - 1)

    def alike(self, trials: int, at_once: int) -> int:
        """How many trials after the first `trials` are begun before one of them has a result.

        Of a number of trials all that have the same box, whatever the machine: they go as many at a
        time as it can. Of a time one for each place there is, for nobody knows how long they take.
        """
        if self.trials is None:
            return at_once
        now = round_of(self.spent(trials, 0))
        numbers = range(trials, self.trials)
        return sum(round_of(self.spent(number, 0)) == now for number in numbers)

    def __str__(self) -> str:
        return f"{self.trials} trials" if self.seconds is None else f"{self.seconds:g} s"


def round_of(spent: float) -> int:
    """0 in the whole box, then 1, 2, ... by the share of the budget that is gone."""
    if spent < EXPLORED:
        return 0
    return 1 + int((spent - EXPLORED) / AGAIN)


def box_size(number: int) -> float:
    """The share of each range that a round searches."""
    return 1.0 if number == 0 else FIRST_BOX / 2 ** (number - 1)


def spread(index: int, dimensions: int) -> list[float]:
    """Point `index` of a Kronecker sequence in the unit cube.

    Its steps are powers of the generalised golden ratio, the root of x^(d+1) = x + 1, which no
    fraction comes near to: so no point comes near to an earlier one.
    """
    ratio = 2.0
    for _ in range(64):
        ratio = (1 + ratio) ** (1 / (dimensions + 1))
    return [(0.5 + index * ratio**-power) % 1 for power in range(1, dimensions + 1)]


def point(over: Sequence[Range], index: int, size: float, best: Sequence[Value]) -> list[Value]:
    """Point `index` of the sequence in a box of `size` of each range around the best values."""
    found = []
    for one, share, middle in zip(over, spread(index, len(over)), best, strict=True):
        centre = 0.5 if size == 1 else one.place(middle)
        low, high = max(0.0, centre - size / 2), min(1.0, centre + size / 2)
        found.append(one.value(low + share * (high - low)))
    return found
