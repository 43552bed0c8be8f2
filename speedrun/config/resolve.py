"""From a recipe, a track and overrides to one `Config`, remembering where each value came from.

Later layers win: schema defaults, the recipe's chain, the track's chain, `key=value` overrides,
command-line options. Every error names the key, the value, its origin and what is allowed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from speedrun.config.files import Kind, chain, flatten
from speedrun.config.schema import Config
from speedrun.errors import ConfigError


@dataclass(frozen=True)
class Resolved:
    """A validated config and the origin of each of its values by dotted key."""

    config: Config
    origin: Mapping[str, str]

    def rows(self) -> list[tuple[str, Any, str]]:
        return [
            (key, value, self.origin.get(key, "default"))
            for key, value in flatten(self.config.model_dump())
            if key not in ("recipe", "track")
        ]


def describe(model: type[BaseModel] = Config, prefix: str = "") -> dict[str, str]:
    """Every key of the schema with its description."""
    keys: dict[str, str] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys |= describe(field.annotation, f"{prefix}{name}.")
        else:
            keys[f"{prefix}{name}"] = field.description or ""
    return keys


def parse_override(text: str) -> tuple[str, Any]:
    """`key=value`, the value read as TOML and, failing that, as a bare string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"override {text!r} must have the form key=value, for example model.layers=6"
        )
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value


def _check_known(key: str, origin: str) -> None:
    known = describe()
    if key in known and key not in ("recipe", "track"):
        return
    if key in ("recipe", "track"):
        raise ConfigError(f"{key!r} ({origin}) is the {key}'s name, not a setting")
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside:
        raise ConfigError(f"{key!r} ({origin}) is a table; set one of {', '.join(inside)}")
    last = key.rpartition(".")[2]
    same_last = [name for name in known if name.rpartition(".")[2] == last]
    near = same_last or get_close_matches(key, known, n=1, cutoff=0.0)
    raise ConfigError(f"unknown key {key!r} ({origin}); nearest known: {near[0]!r}")


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


@dataclass(frozen=True)
class Rule:
    """A track's reading of a recipe's value: factor * value(of) ** power.

    Written as a number (the factor) or as a table, `{ of = "key", factor = 4.3, power = 0.5 }`.
    """

    of: str
    factor: float
    power: float
    track: str

    @staticmethod
    def read(key: str, written: Any, track: str) -> Rule:
        table = written if isinstance(written, dict) else {"factor": written}
        if set(table) - {"of", "factor", "power"} or not all(
            isinstance(table.get(name, 1), (int, float)) for name in ("factor", "power")
        ):
            raise ConfigError(
                f"scale of {key!r} ({track}) must be a factor or a table of of, factor and power, "
                f"not {written!r}"
            )
        return Rule(table.get("of", key), table.get("factor", 1.0), table.get("power", 1.0), track)

    def __call__(self, value: Any) -> Any:
        if isinstance(value, list):
            return sorted({int(self.factor * item) for item in value})
        scaled = self.factor * value**self.power
        if isinstance(value, int):
            return max(1, round(scaled)) if value else 0
        return scaled

    def __str__(self) -> str:
        power = "" if self.power == 1 else f"^{self.power:g}"
        return f"{power} x {self.factor:g} ({self.track})"


def _apply(key: str, rule: Rule, values: dict[str, Any], origin: dict[str, str]) -> None:
    """Only what a recipe states is read anew; defaults have no size of their own."""
    if rule.of in values:
        named = "" if rule.of == key else f"{rule.of} of "
        values[key], origin[key] = rule(values[rule.of]), f"{named}{origin[rule.of]}{rule}"


def _validate(values: Mapping[str, Any], origin: Mapping[str, str]) -> Config:
    try:
        return Config.model_validate(_nest(values))
    except ValidationError as error:
        first = error.errors()[0]
        parts = [str(part) for part in first["loc"]]
        key = next(
            (k for n in range(len(parts), 0, -1) if (k := ".".join(parts[:n])) in values),
            ".".join(parts),
        )
        where = f" ({origin[key]})" if key in origin else ""
        allowed = first["msg"][0].lower() + first["msg"][1:]
        hint = describe().get(key)
        raise ConfigError(
            f"{key} = {values.get(key, first['input'])!r}{where} cannot be used: {allowed}"
            + (f" [{hint}]" if hint else "")
        ) from None


def resolve(
    recipe: str | None = None,
    track: str | None = None,
    overrides: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Resolved:
    """One config. `options` are dotted keys set by named command-line options."""
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}

    def lay(items: Iterable[tuple[str, Any]], source: str) -> None:
        for key, value in items:
            _check_known(key, source)
            values[key], origin[key] = value, source

    chains: list[tuple[Kind, str | None]] = [("recipe", recipe), ("track", track)]
    for kind, name in chains:
        if name is not None:
            layers = chain(kind, name)
            for layer in layers:
                for key, rule in layer.scale.items():
                    read = Rule.read(key, rule, layer.origin)
                    for known in (key, read.of):
                        _check_known(known, f"scale of {layer.origin}")
                    _apply(key, read, values, origin)
                lay(layer.values.items(), layer.origin)
            values[kind] = Path(name).stem if name.endswith(".toml") else name
    for text in overrides:
        key, value = parse_override(text)
        lay([(key, value)], "override")
    for key, value in (options or {}).items():
        lay([(key, value)], "option")
    return Resolved(_validate(values, origin), origin)


def change(config: Config, overrides: Sequence[str], options: Mapping[str, Any]) -> Resolved:
    """A stored config with some values set anew."""
    values = dict(flatten(config.model_dump()))
    origin = dict.fromkeys(values, "stored")
    for key, value in [*map(parse_override, overrides), *options.items()]:
        _check_known(key, "override")
        values[key], origin[key] = value, "override"
    return Resolved(_validate(values, origin), origin)


def difference(left: Config, right: Config) -> list[tuple[str, Any, Any]]:
    """Keys whose values differ."""
    theirs = dict(flatten(right.model_dump()))
    return [
        (key, value, theirs[key])
        for key, value in flatten(left.model_dump())
        if key not in ("recipe", "track") and value != theirs[key]
    ]


def to_toml(config: Config) -> str:
    return tomli_w.dumps(config.model_dump(mode="json"))


def from_toml(path: Path) -> Config:
    """A config stored with a run."""
    try:
        values = dict(flatten(tomllib.loads(path.read_text(encoding="utf-8"))))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a stored config: {error}") from None
    return _validate(values, dict.fromkeys(values, path.name))
