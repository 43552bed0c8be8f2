"""How a track of another size reads the numbers of a recipe."""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError

from speedrun.config.fields import Section
from speedrun.errors import ConfigError, quoted


class Scaling(Section):
    """How a track of another size reads a recipe's value: factor * value(of) ** power.

    Written as a number (the factor) or as a table, `{ of = "key", factor = 4.3, power = 0.5 }`.
    """

    of: str
    factor: float = 1.0
    power: float = 1.0

    def __call__(self, value: Any) -> Any:
        """Of a number or of a list of whole ones; anything else is refused."""
        items = value if isinstance(value, list) else [value]
        kinds = int if isinstance(value, list) else (int, float)
        if not all(isinstance(item, kinds) and not isinstance(item, bool) for item in items):
            raise ConfigError(
                f"{self.of} = {value!r} is not a number, so it cannot be scaled: take it out"
            )
        try:
            if isinstance(value, list):
                return sorted({int(self.factor * item) for item in value})
            scaled = self.factor * float(value) ** self.power
            if isinstance(value, int):
                return max(1, round(scaled)) if value else 0
            if not math.isfinite(scaled):
                raise OverflowError
        except (ArithmeticError, TypeError, ValueError):  # beyond all floats, 0 ** -1, (-1) ** 0.5
            read = f"{self.factor:g} * {value} ** {self.power:g}"
            raise ConfigError(
                f"{read} is no number that {self.of} can have: change its scale"
            ) from None
        return scaled

    def inverse(self, found: float) -> float:
        """The number that is read as `found`; a whole one for a whole one."""
        if self.factor <= 0 or self.power == 0:
            raise ConfigError(
                f"the scale of {self.of!r} cannot be undone: its factor must be above 0 and its "
                "power not 0"
            )
        value: float = (found / self.factor) ** (1 / self.power)
        if not isinstance(found, int):
            return value
        whole = round(value)
        if self(whole) != found:
            raise ConfigError(
                f"{self.of} = {found} cannot be stated: no whole number scales to it; use another"
            )
        return whole


def read_scaling(key: str, written: Any, origin: str) -> Scaling:
    """What the file `origin` says in its [scale] about a key."""
    table = written if isinstance(written, dict) else {"factor": written}
    try:
        return Scaling.model_validate({"of": key, **table})
    except ValidationError:
        raise ConfigError(
            f"scale of {key!r} ({origin}) must be a factor or a table of of, factor and power, "
            f"not {quoted(written)}"
        ) from None
