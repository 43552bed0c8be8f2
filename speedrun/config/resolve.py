"""From a recipe, a track and overrides to one `Config`, remembering where each value came from.

Later layers win: schema defaults, the recipe's chain, the track's chain, `key=value` overrides,
command-line options. Every error names the key, the value, its origin and what is allowed.

Whoever names another text (a dataset, sources, a tokenizer) than the built-in files do has not
thought of the values that stand below it: `Resolved.for_other_text` lists them, and `data/fit.py`
makes those fit that do not.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from speedrun.config.code import found
from speedrun.config.experiment import all_differences, all_values
from speedrun.config.files import Kind, built_in, chain, flatten, is_path, read_toml
from speedrun.config.fixed import of_layers
from speedrun.config.keys import CODE_TABLES, check_known, describe, settable, whole, with_lists
from speedrun.config.scaling import read_scaling
from speedrun.config.schema import MOVED, Config
from speedrun.errors import ConfigError, quoted

WINDOWS = ("attention.window_start", "attention.window_end", "validation.window")
TEXT = ("data.dir", "data.sources", "data.tokenizer")  # the keys that say what is trained on
# What race, ablate and tune set for runs of theirs, though a track fixes it: `key:=value`.
COMMANDS_OWN = ("validation.rows", "train.target")


@dataclass(frozen=True)
class Resolved:
    """A validated config and the origin of each of its values by dotted key."""

    config: Config
    origin: Mapping[str, str]
    # Where somebody named a text: the keys that were set below, for another one, and what the
    # built-in files say in its place.
    for_other_text: frozenset[str] = frozenset()
    usual_text: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # values that are others than were written, as sentences

    def with_values(self, changes: Mapping[str, tuple[Any, str]]) -> Resolved:
        """With other values, each with its origin."""
        values = dict(flatten(self.config.model_dump()))
        values |= {key: value for key, (value, _) in changes.items()}
        origin = {**self.origin, **{key: source for key, (_, source) in changes.items()}}
        return replace(self, config=_validate(values, origin), origin=origin)

    def rows(self) -> list[tuple[str, Any, str]]:
        return [
            (key, value, self.origin.get(key, "default"))
            for key, value in flatten(self.config.model_dump())
            if key not in ("recipe", "track")
        ]


def parse_override(text: str) -> tuple[str, Any]:
    """`key=value`, the value read as TOML and, failing that, as a bare string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"override {quoted(text)} must have the form key=value, for example model.layers=6"
        )
    if (own := key.removesuffix(":")) in COMMANDS_OWN:
        key = own
    try:
        read = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):  # no TOML, too many digits, or brackets without end
        return key.strip(), value
    if len(read) > 1:
        raise ConfigError(
            f"override {quoted(text)} says more than one thing: write each key=value as a word "
            "of its own"
        )
    return key.strip(), read["value"]


def is_commands_own(word: str) -> bool:
    """Whether an override sets what a track may fix, `key:=value`."""
    return word.partition("=")[0].removesuffix(":") in COMMANDS_OWN and ":=" in word


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key as the tables of a recipe."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):  # of a stored config: others are looked at key by key
                raise ConfigError(f"{key} cannot be set: {part} is a value there and not a table")
        node[last] = value
    return tree


@dataclass(frozen=True)
class _Stack:
    """Values by dotted key, the last one laid on top, and where each came from."""

    values: dict[str, Any]
    origin: dict[str, str]
    height: dict[str, int] = field(default_factory=dict)  # number of the layer that set a key
    layers: list[bool] = field(default_factory=list)  # of each, whether it is a user's own
    usual_text: dict[str, Any] = field(default_factory=dict)  # what the others say of the text

    def lay(
        self,
        items: Iterable[tuple[str, Any]],
        source: str,
        *,
        users_own: bool = True,
        folder: Path | None = None,
    ) -> None:
        """`folder` is where the files lie that the layer names, by default the current one."""
        layer = dict(items)
        for table in CODE_TABLES:
            if isinstance(layer.get(f"{table}.args"), dict):  # of an override: {lr = 0.1}
                layer |= dict(flatten(layer.pop(f"{table}.args"), f"{table}.args."))
        if any(whole(key) != key for key in layer):
            # Whoever names other code has none of the arguments of the one before.
            gone = tuple(f"{table}.args." for table in CODE_TABLES if f"{table}.use" in layer)
            below = {key: value for key, value in self.values.items() if not key.startswith(gone)}
            layer = with_lists(layer, {**_defaults(), **below})
        for key, value in layer.items():
            check_known(key, source)
            self._set(key, value, source)
            if key in TEXT and not users_own:
                self.usual_text[key] = value
        for table in CODE_TABLES:
            if isinstance(use := layer.get(f"{table}.use"), str):
                self._name_code(table, use, layer, source, folder or Path())
        self.layers.append(users_own)

    def _set(self, key: str, value: Any, source: str) -> None:
        self.values[key], self.origin[key] = value, source
        self.height[key] = len(self.layers)

    def _name_code(
        self, table: str, use: str, layer: Mapping[str, Any], source: str, folder: Path
    ) -> None:
        """What follows from naming code: its hash and place, and that no other's arguments stay."""
        for key in [key for key in self.values if key.startswith(f"{table}.args")]:
            if key not in layer:
                del self.values[key], self.origin[key]
        try:
            for name, value in found(use, folder).items():
                self._set(f"{table}.{name}", value, source)
        except ConfigError as error:
            raise ConfigError(f"{table}.use ({source}): {error}") from None
        stated = "optimizer.kind" in layer
        owned = use or self.values.get("optimizer.kind") == "own"
        if table == "optimizer.hidden" and owned and not stated:
            self._set("optimizer.kind", "own" if use else "adamw", f"{table}.use ({source})")

    def for_other_text(self) -> frozenset[str]:
        """All keys below the layer in which a user names the text; none where nobody does."""
        named = max(self.height.get(key, -1) for key in TEXT)
        if named < 0 or not self.layers[named]:
            return frozenset()
        return frozenset(key for key in describe() if self.height.get(key, -1) < named)

    def loosen_tokenizer(self) -> None:
        """A user's own sources may be too short for as many ids as a track's tokenizer has."""
        at, tokenizer = self.height.get("data.sources", -1), self.values.get("data.tokenizer")
        if at < 0 or not self.layers[at] or self.height.get("data.tokenizer", -1) >= at:
            return
        written = self.values["data.sources"]
        sources = [written] if isinstance(written, str) else written
        if sources == self.usual_text.get("data.sources"):  # named, and no other text for that
            return
        if isinstance(tokenizer, str) and re.fullmatch(r"bpe:[0-9]+", tokenizer):
            self.values["data.tokenizer"] = tokenizer.replace(":", ":..")
            self.origin["data.tokenizer"] += ", or fewer ids"

    def shorten_windows(self) -> tuple[str, ...]:
        """A row of a user's own length holds shorter windows than a recipe has; what to say."""
        length = self.values.get("batch.length")
        at = self.height.get("batch.length", -1)
        if at < 0 or not self.layers[at] or not isinstance(length, int):
            return ()
        changes = []
        for key in WINDOWS:
            window = self.values.get(key)
            if self.height.get(key, -1) < at and isinstance(window, int) and window > length > 0:
                self.values[key] = length
                self.origin[key] = f"{window} of {self.origin[key]}, at most batch.length"
                changes.append(f"{key} {window:,} -> {length:,}")
        return (f"shortened to batch.length: {', '.join(changes)}",) if changes else ()

    def scale(self, key: str, written: Any, track: str) -> None:
        """Only what a recipe states is read anew; defaults have no size of their own."""
        scaling = read_scaling(key, written, track)
        for known in (key, scaling.of):
            check_known(known, f"scale of {track}")
        if scaling.of in self.values:
            try:
                self.values[key] = scaling(self.values[scaling.of])
            except ConfigError as error:
                raise ConfigError(f"scale of {key!r} ({track}): {error}") from None
            named = "" if scaling.of == key else f"{scaling.of} of "
            power = "" if scaling.power == 1 else f"^{scaling.power:g}"
            source = f"{named}{self.origin[scaling.of]}{power}"
            self.origin[key] = f"{source} x {scaling.factor:g} ({track})"
            self.height[key] = len(self.layers)  # that of the track's values, which come next


@cache
def _defaults() -> dict[str, Any]:
    return all_values(Config())


def _validate(values: Mapping[str, Any], origin: Mapping[str, str]) -> Config:
    try:
        return Config.model_validate(nest(values))
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
            f"{key} = {quoted(values.get(key, first['input']))}{where} cannot be used: {allowed}"
            + (f" [{hint}]" if hint else "")
        ) from None


def resolve(
    recipe: str | None = None,
    track: str | None = None,
    overrides: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Resolved:
    """One config. `options` are dotted keys set by named command-line options."""
    stack = _Stack({}, {})
    chains: dict[Kind, str | None] = {"recipe": recipe, "track": track}
    fixed, plain = None, {}
    for kind, name in chains.items():
        if name is not None:
            layers = chain(kind, name)
            if kind == "track" and recipe is not None and (fixed := of_layers(layers)):
                plain = all_values(resolve(None, name).config)
                fixed.refuse_changes(plain, stack.values, stack.origin)
            for layer in layers:
                for key, written in layer.notes.get("scale", {}).items():
                    stack.scale(key, written, layer.origin)
                users_own = layer.name not in built_in(kind)
                stack.lay(
                    layer.values.items(), layer.origin, users_own=users_own, folder=layer.folder
                )
            stack.values[kind] = Path(name).stem if is_path(name) else name
    stack.lay(map(parse_override, overrides), "override")
    stack.lay((options or {}).items(), "option")
    notes = stack.shorten_windows()
    stack.loosen_tokenizer()
    config = _validate(stack.values, stack.origin)
    if fixed:
        commands = {word.partition(":=")[0] for word in overrides if is_commands_own(word)}
        fixed.refuse_changes(plain, all_values(config), stack.origin, commands)
    return Resolved(config, stack.origin, stack.for_other_text(), stack.usual_text, notes)


def recipe_value(key: str, value: float, track: str) -> float:
    """What a recipe states for `track` to read it as `value`: the track's scaling backwards.

    Refused where no recipe decides: the track sets the key, or derives one key from another.
    """
    key = whole(key)  # no track scales a list
    for layer in reversed(chain("track", track)):
        if key in layer.values:
            raise ConfigError(
                f"{key} is not for a recipe to decide: {layer.origin} sets it; choose another key"
            )
        for scaled, written in layer.notes.get("scale", {}).items():
            scaling = read_scaling(scaled, written, layer.origin)
            if key in (scaled, scaling.of) and scaled != scaling.of:
                raise ConfigError(
                    f"{key} cannot be stated by itself: {layer.origin} makes {scaled} of "
                    f"{scaling.of}, so the one does not go without the other"
                )
            if key == scaled:
                value = scaling.inverse(value)
    return value


def change(config: Config, overrides: Sequence[str], options: Mapping[str, Any]) -> Resolved:
    """A stored config with some values set anew."""
    values = dict(flatten(config.model_dump()))
    stack = _Stack(values, dict.fromkeys(values, "stored"))
    stack.lay([*map(parse_override, overrides), *options.items()], "override")
    return Resolved(_validate(stack.values, stack.origin), stack.origin)


def toml_text(value: Any) -> str:
    """A value as a recipe or an override would write it."""
    if value is None:  # a key that another config has
        return "-"
    return json.dumps(value, ensure_ascii=False)  # the same for all that a config holds


def override_words(base: Config, config: Config, but: Sequence[str] = ()) -> dict[str, str]:
    """What makes `config` of `base`, as `key=value` by key; but for names and keys in `but`."""
    found = {}
    for key, _, value in all_differences(base, config, but):
        table, _, last = key.rpartition(".")
        if not settable(key):
            continue
        if table in CODE_TABLES and last == "use":
            place = all_values(config).get(f"{table}.place")
            value = str(Path(place) / value) if place and value else value or ""
        if value is not None:  # an argument that is gone went with its `use`
            plain = f"{key}={value}"
            same = isinstance(value, str) and value and parse_override(plain)[1] == value
            found[key] = plain if same else f"{key}={toml_text(value)}"
    return found


def to_toml(config: Config) -> str:
    return tomli_w.dumps(config.model_dump(mode="json"))


# What the config of a run has said in every version; later keys are missing in older runs.
STORED = ("recipe", "track", "model.layers", "model.width", "batch.tokens", "train.seed")


def from_toml(path: Path) -> Config:
    """A config stored with a run."""
    try:
        stored = dict(flatten(read_toml(path)))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as a stored config: {error}; restore it from a copy"
        ) from None
    values = {MOVED.get(key, key): value for key, value in stored.items()}
    config = _validate(values, dict.fromkeys(values, path.name))
    for key in STORED:
        if key not in values:
            raise ConfigError(f"{path} states no {key}: it was cut or changed; put a copy back")
    return config
