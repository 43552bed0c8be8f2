"""What all sections of the schema share: field types, the base class, the mark of a technique."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from speedrun.errors import ConfigError, quoted

LEAST, MOST = 2.0**-126, 2.0**127  # what a 32-bit float holds with all of its digits, and safely
SEEDS = 2**64  # a generator of random numbers takes 64 bits


def _fits(value: float) -> float:
    if value and not LEAST <= value <= MOST:
        raise PydanticCustomError(
            "single", f"runs compute with 32-bit floats: use 0 or {LEAST:.2g} to {MOST:.2g}"
        )
    return value


def _can_be_stored(text: str) -> str:
    """A run's config.toml is UTF-8, and no name of a file has a zero in it."""
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise PydanticCustomError("text", "it has bytes that are not UTF-8, or zeros: rename it")
    return text


Text = Annotated[str, AfterValidator(_can_be_stored)]
MOST_COUNT = 2**40  # no run has as many steps or tokens
Count = Annotated[int, Field(ge=1, le=MOST_COUNT)]
Amount = Annotated[int, Field(ge=0, le=MOST_COUNT)]
Seed = Annotated[int, Field(ge=0, lt=SEEDS)]
Positive = Annotated[float, Field(gt=0), AfterValidator(_fits)]
NonNegative = Annotated[float, Field(ge=0), AfterValidator(_fits)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class Technique:
    """Marks a field as the switch of a technique, so that `ablate` can take it out of a recipe.

    `off` is the field's value without the technique; `on` the one value that means it is there,
    where not every other value does; `also` are other keys that must go with it.
    """

    name: str
    off: Any
    on: Any = None
    also: dict[str, Any] = field(default_factory=dict)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def refuse(key: str, value: object, allowed: str) -> NoReturn:
    raise ConfigError(f"{key} = {quoted(value)} cannot be used: {allowed}")
