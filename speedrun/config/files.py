"""Recipe and track files: found by name or path, read, and followed along `extends`.

A file holds `extends` (a built-in name, or a path relative to the file), notes about itself
(`why`), and tables of the schema. Built-in and user files go through the same code.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from speedrun.errors import ConfigError, quoted

Kind = Literal["recipe", "track"]
FOLDERS: dict[Kind, Path] = {
    "recipe": Path(__file__).parent / "recipes",
    "track": Path(__file__).parent / "tracks",
}
# Recipes of the optimizer track: each is called by its name like the others, and listed apart.
OPTIMIZERS = Path(__file__).parent / "optimizers"
# What a file may say of itself beside the values it sets.
NOTES: dict[str, tuple[type, ...]] = {
    "extends": (str,),
    "why": (str,),
    "published_minutes": (float, int),
    "scale": (dict,),
    "fixed": (list,),
    "free": (list,),
    "sigma": (float,),
    "tuned_on": (str,),
}
TRACKS_NOTES = ("scale", "fixed", "free", "sigma", "tuned_on")


@dataclass(frozen=True)
class Layer:
    """One file: its values by dotted key, and what it says of itself."""

    kind: Kind
    name: str
    notes: Mapping[str, Any]
    values: Mapping[str, Any]
    folder: Path  # of the file

    @property
    def origin(self) -> str:
        return f"{self.kind} {self.name}"


def names(kind: Kind) -> list[str]:
    return sorted(path.stem for path in FOLDERS[kind].glob("*.toml"))


def optimizers() -> list[str]:
    """Recipes that differ in their optimizer alone, written for the track of that name."""
    return sorted(path.stem for path in OPTIMIZERS.glob("*.toml"))


def built_in(kind: Kind) -> list[str]:
    """Every name that needs no path."""
    return [*names(kind), *(optimizers() if kind == "recipe" else ())]


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def is_path(name: str) -> bool:
    """Whether a recipe or track is named by where its file lies."""
    return name.endswith(".toml") or "/" in name


def read_toml(path: Path) -> dict[str, Any]:
    """What a file holds; whatever is no TOML is a ValueError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        list(flatten(table))  # as deep as anybody will go
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return table


def _locate(kind: Kind, name: str, folder: Path | None) -> Path:
    if is_path(name):
        path = Path(name).expanduser()
        path = folder / path if folder and not path.is_absolute() else path
        if not path.is_file():
            near = get_close_matches(path.name, _files_in(path.parent), n=1)
            there = f"nearest: {quoted(str(Path(name).parent / near[0]))}; " if near else ""
            raise ConfigError(
                f"{kind} file {quoted(name)} does not exist; {there}name one of "
                f"{', '.join(built_in(kind))} or a path to a .toml file"
            )
        return path
    if name in built_in(kind):
        inside = FOLDERS[kind] if name in names(kind) else OPTIMIZERS
        return inside / f"{name}.toml"
    near = get_close_matches(name, [*built_in(kind), *_files_in(folder or Path())], n=1, cutoff=0.0)
    raise ConfigError(
        f"{kind} {quoted(name)} is not known; nearest: {quoted(near[0])} (known: "
        f"{', '.join(built_in(kind))}; "
        "a path to a .toml file works too)"
    )


def _files_in(folder: Path) -> list[str]:
    """What may have been meant by a name with a letter too few."""
    return [path.name for path in folder.glob("*.toml")]


def _read(kind: Kind, name: str, folder: Path | None) -> tuple[Layer, Path]:
    path = _locate(kind, name, folder)
    try:
        table = read_toml(path)
    except ValueError as error:
        raise ConfigError(
            f"{kind} file {path.name!r} is not valid TOML: {error}; mend it"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{kind} file {quoted(name)} cannot be read: {error.strerror}; check its path"
        ) from None
    notes = {key: table.pop(key) for key in NOTES if key in table}
    for key, value in notes.items():
        of_names = not isinstance(value, list) or all(isinstance(one, str) for one in value)
        misplaced = key in TRACKS_NOTES and kind == "recipe"
        if not isinstance(value, NOTES[key]) or misplaced or not of_names:
            raise ConfigError(
                f"{key} = {quoted(value)} cannot be used in {kind} {path.name!r}: "
                "extends and why are texts, published_minutes a number, scale a track's table, "
                "fixed and free a track's lists of keys, sigma a track's number below 1, tuned_on "
                "the name of another track"
            )
    shown = path.stem if path.parent in (FOLDERS[kind], OPTIMIZERS) else name
    return Layer(kind, shown, notes, dict(flatten(table)), path.parent), path


def chain(kind: Kind, name: str) -> list[Layer]:
    """The file called `name` and all it extends, oldest ancestor first."""
    layers: list[Layer] = []
    seen: list[Path] = []
    folder: Path | None = None
    while True:
        layer, path = _read(kind, name, folder)
        if path.resolve() in seen:
            raise ConfigError(
                f"{kind} {name!r} extends itself: "
                + " -> ".join([*(p.stem for p in seen), path.stem])
                + "; change one of these `extends`"
            )
        seen.append(path.resolve())
        layers.insert(0, layer)
        if "extends" not in layer.notes:
            return layers
        name, folder = layer.notes["extends"], path.parent
