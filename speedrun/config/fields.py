"""What all sections of the schema share: field types, the base class, the mark of a technique."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field

from speedrun.errors import ConfigError

Count = Annotated[int, Field(ge=1)]
Amount = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
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
    raise ConfigError(f"{key} = {value!r} cannot be used: {allowed}")
