"""What a track fixes: keys that neither a recipe nor a user's word may change there.

A track's file lists them by key or by section, and what of them is free after all:

    fixed = ["model", "data", "train.target"]
    free = ["model.init"]

On such a track entries differ in nothing but what is free, so a recipe that says otherwise is
refused, even where the track's own value would have won.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel

from speedrun.config.files import Layer, chain
from speedrun.config.schema import Config
from speedrun.errors import ConfigError, quoted


@dataclass(frozen=True)
class Fixed:
    """Keys and sections that are fixed, and those of them that are not."""

    track: str
    fixed: tuple[str, ...]
    free: tuple[str, ...]

    def holds(self, key: str) -> bool:
        return _among(key, self.fixed) and not _among(key, self.free)

    def refuse_changes(
        self,
        own: Mapping[str, Any],
        values: Mapping[str, Any],
        origin: Mapping[str, str],
        but: Collection[str] = (),
    ) -> None:
        """Values that differ from the track's own; `but` is what a command sets for its runs."""
        for key, value in values.items():
            meant = own.get(key)
            if self.holds(key) and key not in but and not _same(value, meant):
                at = "" if meant is None else f" at {quoted(meant)}"
                raise ConfigError(
                    f"{key} = {quoted(value)} ({origin.get(key, 'a default')}) cannot be used: "
                    f"{self.track} fixes {key}{at}; free there are {self.free_text}"
                )

    @property
    def free_text(self) -> str:
        sections = (name for name in Config.model_fields if name not in ("recipe", "track"))
        whole = [name for name in sections if not _touched(name, self.fixed)]
        return ", ".join((*whole, *self.free))


def of_layers(layers: Sequence[Layer]) -> Fixed | None:
    """What the last file of a track's chain that fixes anything says, and the files before it."""
    said = {
        key: layer.notes[key] for layer in layers for key in ("fixed", "free") if key in layer.notes
    }
    if not said.get("fixed"):
        return None
    for name in (name for named in said.values() for name in named):
        if name not in (known := [*_known()]):
            near = get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"{layers[-1].origin} fixes or frees {quoted(name)}, which is no key; nearest "
                f"known: {near!r}"
            )
    return Fixed(layers[-1].origin, tuple(said["fixed"]), tuple(said.get("free", ())))


def of_track(track: str) -> Fixed | None:
    return of_layers(chain("track", track))


def _among(key: str, named: Iterable[str]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in named)


def _touched(section: str, named: Iterable[str]) -> bool:
    return any(one == section or one.startswith(f"{section}.") for one in named)


def _same(value: Any, other: Any) -> bool:
    """As a config reads them: a list is a tuple, and a name by itself a list of one."""
    if isinstance(value, list) or isinstance(other, list):
        return _as_list(value) == _as_list(other)
    return bool(value == other)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _known(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every table and key of the schema."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _known(field.annotation, f"{prefix}{name}.")
