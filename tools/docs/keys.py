"""The page of every key of the config, from the schema: what it may be and does, who sets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from speedrun.config.fields import Section, Technique
from speedrun.config.files import Kind, built_in, chain
from speedrun.config.resolve import toml_text
from speedrun.config.schema import Config
from tools.docs.markdown import code, table

NAMES = ("recipe", "track")  # of the files a config came from, which no file sets

ABOUT = """\
Every value that a run depends on, generated from the schema. A recipe or a track sets them in its
TOML tables, `key=value` sets one on the command line, and `speedrun train RECIPE --dry-run` shows
all of them with where they come from. A *technique* is a switch that `speedrun ablate` takes out of
a recipe by its name. Counts of steps are written for a run of `schedule.steps` steps and scale with
the length that a run has."""


@dataclass(frozen=True)
class Part:
    """A table of the schema with its own keys, tables inside it left out."""

    path: str
    about: str
    keys: Mapping[str, FieldInfo]


def parts(model: type[BaseModel] = Config, path: str = "", about: str = "") -> Iterator[Part]:
    """The tables of the schema, outer ones first."""
    inner = {name: field for name, field in model.model_fields.items() if _section(field)}
    own = {
        f"{path}.{name}".lstrip("."): field
        for name, field in model.model_fields.items()
        if name not in inner and not (name in NAMES and not path)
    }
    if own:
        yield Part(path, about or _sentence(model), own)
    for name, field in inner.items():
        section = _section(field)
        assert section is not None
        said = field.description or ""
        yield from parts(section, f"{path}.{name}".lstrip("."), f"{said}." if said else "")


def _section(field: FieldInfo) -> type[Section] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _sentence(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().partition("\n\n")[0]


def allowed(field: FieldInfo) -> str:
    """The values that a key takes, in words."""
    return _allowed(field.annotation, field.metadata)


def _allowed(kind: Any, metadata: list[Any]) -> str:
    if kind is bool:
        return "`true`, `false`"
    if get_origin(kind) is Literal:
        return ", ".join(code(toml_text(value)) for value in get_args(kind))
    if get_origin(kind) is tuple:
        inner = [one for one in get_args(kind) if one is not Ellipsis]
        each = _annotated(inner[0])
        return f"a list: {each}" if Ellipsis in get_args(kind) else f"{len(inner)} of: {each}"
    if get_origin(kind) is dict:
        return "a table of names and values"
    assert get_origin(kind) not in (Union,), kind
    name = {int: "a whole number", float: "a number", str: "text"}[kind]
    return name + "".join(_bound(one) for one in metadata)


def _annotated(kind: Any) -> str:
    if kind is str:
        return "text"
    base, *notes = get_args(kind)
    flat = [one for note in notes for one in getattr(note, "metadata", [note])]
    return _allowed(base, flat)


def _bound(note: Any) -> str:
    match note:
        case annotated_types.Ge(ge=least):
            return f" from {least}"
        case annotated_types.Gt(gt=least):
            return f" above {least}"
        case annotated_types.Lt(lt=most):
            return f" to below {most}"
    return ""


def setters(kind: Kind) -> dict[str, list[tuple[str, Any]]]:
    """By key: which files set it themselves, and to what."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for name in built_in(kind):
        for key, value in chain(kind, name)[-1].values.items():
            found.setdefault(key, []).append((name, value))
    return found


def page() -> str:
    """The page of the reference."""
    by_recipe, by_track = setters("recipe"), setters("track")
    entries = [_part(part, by_recipe, by_track) for part in parts()]
    return "\n\n".join(["# Keys", ABOUT, *entries]) + "\n"


def _part(part: Part, by_recipe: Mapping[str, Any], by_track: Mapping[str, Any]) -> str:
    rows = [
        (
            f"[{code(key)}](#{key}){{ #{key} }}",
            "<br>".join(_meaning(key, field, by_recipe, by_track)),
            allowed(field),
            code(toml_text(field.default)),
        )
        for key, field in part.keys.items()
    ]
    head = ("key", "what it does", "values", "default")
    return f"## {part.path} {{ #{part.path} }}\n\n{part.about}\n\n{table(head, rows)}"


def _meaning(
    key: str, field: FieldInfo, by_recipe: Mapping[str, Any], by_track: Mapping[str, Any]
) -> Iterator[str]:
    assert field.description, f"{key} has no description"
    yield field.description + "."
    for mark in field.metadata:
        if isinstance(mark, Technique):
            others = "".join(f", {code(f'{k}={toml_text(v)}')}" for k, v in mark.also.items())
            yield f"Technique *{mark.name}*; without it {code(toml_text(mark.off))}{others}."
    setting = [
        f"[{name}]({page_name}.md#{name}) {code(toml_text(value))}"
        for page_name, files in (("recipes", by_recipe), ("tracks", by_track))
        for name, value in files.get(key, ())
    ]
    if setting:
        yield f"Set by {', '.join(setting)}."
