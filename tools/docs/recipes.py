"""The pages of recipes and tracks: each as what it changes in the one it extends."""

from __future__ import annotations

from collections.abc import Sequence

from speedrun.config.code import WORKED_OUT
from speedrun.config.experiment import all_differences
from speedrun.config.files import Kind, Layer, chain, names, optimizers
from speedrun.config.keys import is_argument
from speedrun.config.resolve import resolve, toml_text
from speedrun.config.scaling import Scaling, read_scaling
from speedrun.config.schema import Config
from tools.docs.markdown import code, table

ABOUT: dict[Kind, str] = {
    "recipe": """\
A recipe says how to train. Each is shown as what it changes in the one it extends, one without a
parent as what it changes in the defaults of the schema. Values are those of the public records, for
768 channels and 12 layers; a [track](tracks.md) of another size says how it reads them.
`speedrun recipes show NAME` prints all that a recipe sets.""",
    "track": """\
A track says what is raced: the text, the size of the model, the target. Each is shown as what it
changes in the one it extends, one without a parent as what it changes in the defaults of the
schema, and how it reads what a [recipe](recipes.md) states.""",
}
OPTIMIZERS = """\
Those that follow differ in the optimizer of the hidden matrices alone. They are the rows of
[the optimizer track](../OPTIMIZERS.md), for whose model and batch their rates are written."""


def page(kind: Kind) -> str:
    """The page of the reference."""
    entries = [_entry(kind, name) for name in in_order(kind, names(kind))]
    if kind == "recipe":
        entries += [OPTIMIZERS, *(_entry(kind, name) for name in in_order(kind, optimizers()))]
    return "\n\n".join([f"# {kind.title()}s", ABOUT[kind], *entries]) + "\n"


def in_order(kind: Kind, which: Sequence[str]) -> list[str]:
    """Names, each after the one it extends and before what has nothing to do with it."""
    return sorted(which, key=lambda name: [layer.name for layer in chain(kind, name)])


def _entry(kind: Kind, name: str) -> str:
    layer = chain(kind, name)[-1]
    parts = [f"## {name} {{ #{name} }}", layer.notes.get("why", ""), _origin(layer)]
    parts += [_changes(kind, layer), _scales(layer)]
    return "\n\n".join(part for part in parts if part)


def _origin(layer: Layer) -> str:
    parent, minutes = layer.notes.get("extends"), layer.notes.get("published_minutes")
    said = [f"Extends [{parent}](#{parent})." if parent else "Extends nothing."]
    if minutes:
        said.append(f"Published: {minutes:g} minutes on 8 x H100.")
    return " ".join(said)


def _changes(kind: Kind, layer: Layer) -> str:
    parent = layer.notes.get("extends")
    before = _alone(kind, parent) if parent else Config()
    rows = [
        (f"[{code(key)}](keys.md#{_entry_of(key)})", code(toml_text(one)), code(toml_text(other)))
        for key, one, other in all_differences(before, _alone(kind, layer.name))
        if key.rpartition(".")[2] not in WORKED_OUT
    ]
    if not rows:
        return "It changes no value."
    return table(("key", parent or "default", layer.name), rows)


def _entry_of(key: str) -> str:
    """Where a key is explained: arguments of named code are, all of them, where `args` is."""
    return key.rpartition(".")[0] if is_argument(key) else key


def _alone(kind: Kind, name: str) -> Config:
    return (resolve(recipe=name) if kind == "recipe" else resolve(track=name)).config


def _scales(layer: Layer) -> str:
    rows = [
        (f"[{code(key)}](keys.md#{key})", _formula(key, read_scaling(key, written, layer.origin)))
        for key, written in layer.notes.get("scale", {}).items()
    ]
    return "How it reads a recipe:\n\n" + table(("key", "becomes"), rows) if rows else ""


def _formula(key: str, scaling: Scaling) -> str:
    of = "the recipe's own" if scaling.of == key else f"the recipe's {code(scaling.of)}"
    power = "" if scaling.power == 1 else f" to the power of {scaling.power:g}"
    return f"{scaling.factor:g} times {of}{power}"
