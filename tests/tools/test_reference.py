"""The generated pages of the site have an entry for everything there is, read off in other ways."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any

import pytest
import typer
from pydantic import BaseModel, Field
from typer.main import get_command

from speedrun.cli import app
from speedrun.config.files import Kind, chain, flatten, names
from speedrun.config.keys import describe, schema_fields
from speedrun.config.resolve import resolve, toml_text
from speedrun.config.schema import Config
from tests.documents import ROOT
from tools.docs import autolink, keys, reference, verbs


@cache
def page(place: str) -> str:
    return reference.pages()[place]


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that the shell can call, as typer itself builds them."""
    for name, command in group.commands.items():
        below = (*path, name)
        if hasattr(command, "commands"):
            if command.invoke_without_command:
                yield below, command
            yield from commands(command, below)
        else:
            yield below, command


def section(text: str, anchor: str) -> str:
    """What stands under a heading, up to the next."""
    found = re.search(rf"^## [^\n]* {{ #{re.escape(anchor)} }}$(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found, f"{anchor} has no entry"
    return found[1]


COMMANDS = dict(commands(get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids="-".join)
def test_every_verb_has_an_entry_with_all_its_options(path: tuple[str, ...]) -> None:
    entry = section(page(reference.VERBS), "-".join(path))
    for parameter in COMMANDS[path].params:
        if parameter.name == "help":
            continue
        shown = parameter.opts if parameter.param_type_name == "option" else []
        for name in shown:
            assert re.search(rf"`[^`]*(?<![\w-]){re.escape(name)}[ ,`]", entry), f"{path}: {name}"
        assert parameter.help.split(" ")[0] in entry


def test_an_entry_shows_defaults_limits_and_examples() -> None:
    entry = section(page(reference.VERBS), "train")
    assert "speedrun train [RECIPE] [KEY=VALUE...]" in entry
    assert "| `--run, --run-dir PATH` |" in entry
    [keep] = [line for line in entry.splitlines() if "--keep" in line]
    assert "At least 1." in keep
    assert keep.endswith("`2` |")
    assert "Example: `speedrun train best" in entry


def test_an_option_without_help_cannot_be_documented() -> None:
    bare = typer.Typer()

    @bare.command()
    def mute(word: Annotated[str, typer.Argument()]) -> None: ...

    with pytest.raises(AssertionError, match="word has no help"):
        verbs.page(bare)


def leaves(schema: dict[str, Any], root: dict[str, Any], path: str = "") -> Iterator[str]:
    """The keys of a JSON schema, which pydantic makes by itself."""
    for name, field in schema["properties"].items():
        target = field.get("$ref") or next((o["$ref"] for o in field.get("allOf", ())), None)
        key = f"{path}{name}"
        if target:
            yield from leaves(root["$defs"][target.rpartition("/")[2]], root, f"{key}.")
        else:
            yield key


def test_every_key_has_an_entry() -> None:
    root = Config.model_json_schema()
    expected = set(leaves(root, root)) - {"recipe", "track"}
    assert expected == set(describe()) - {"recipe", "track"}
    row = r"^\| \[`([\w.]+)`\]\(#\1\)\{ #\1 \} \|"
    found = re.findall(row, page(reference.KEYS), re.M)
    assert sorted(found) == sorted(expected)


def test_every_key_says_what_it_does() -> None:
    """In the metadata of its field, which errors and the reference print."""
    mute = [key for key, field in schema_fields() if not (field.description or "").strip()]
    assert mute == []
    sections = [part.path for part in keys.parts() if not part.about]
    assert sections == []


def test_a_key_says_values_technique_and_who_sets_it() -> None:
    [softcap] = [line for line in page(reference.KEYS).splitlines() if "{ #model.softcap }" in line]
    assert "a number from 0" in softcap
    assert "Technique *softcap*; without it `0.0`." in softcap
    assert "[record-18](recipes.md#record-18) `15.0`" in softcap
    assert "best" not in softcap, "it takes the value over and does not set it"


class Kinds(BaseModel):
    share: Annotated[float, Field(ge=0, lt=1)] = 0.5
    names: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("name", "words"),
    [("share", "a number from 0 to below 1"), ("names", "a list: text")],
)
def test_values_in_words(name: str, words: str) -> None:
    assert keys.allowed(Kinds.model_fields[name]) == words


@pytest.mark.parametrize("kind", ["recipe", "track"])
def test_every_file_is_shown_as_its_difference(kind: Kind) -> None:
    text = page(reference.RECIPES if kind == "recipe" else reference.TRACKS)
    for name in names(kind):
        values = dict(flatten(Config().model_dump(mode="json")))
        *ancestors, own = chain(kind, name)
        for layer in ancestors:
            values |= layer.values
        changed = {k: toml_text(v) for k, v in own.values.items() if v != values[k]}
        entry = section(text, name)
        rows = re.findall(r"^\| \[`([\w.]+)`\]\(keys.*`([^`]*)` \|$", entry, re.M)
        stated = {key: value for key, value in rows if key in own.values}
        assert stated == changed, name
        for key in own.notes.get("scale", ()):
            assert f"`{key}`" in entry


def test_names_of_the_reference_become_links_once() -> None:
    text = "<p><code>record-18</code> and <code>record-18</code></p><pre><code>best</code></pre>"
    explained = {"record-18": "reference/recipes.md#record-18", "best": "reference/recipes.md#best"}
    found = autolink.linked(text, "using.md", explained)
    link = '<a class="explained" href="reference/recipes.html#record-18"><code>record-18</code></a>'
    rest = "<code>record-18</code></p><pre><code>best</code></pre>"
    assert found == f"<p>{link} and {rest}"
    inside = autolink.linked(text, "reference/tracks.md", explained)
    assert 'href="recipes.html#record-18"' in inside
    assert autolink.linked(text, "reference/recipes.md", explained) == text


def test_the_table_of_tracks_says_what_the_tracks_say() -> None:
    """Of docs/concepts.md, which is written by hand."""
    row = r"^\| `([\w-]+)` \| [^|]+ \| (\d+) layers of (\d+) \| ([\d.]+) \|"
    rows = re.findall(row, (ROOT / "docs" / "concepts.md").read_text(), re.M)
    assert sorted(name for name, *_ in rows) == names("track")
    for name, layers, width, target in rows:
        config = resolve(track=name).config
        assert (config.model.layers, config.model.width) == (int(layers), int(width))
        assert config.train.target == float(target)


def test_every_name_leads_to_an_entry() -> None:
    for name, place in reference.explained().items():
        file, _, anchor = place.partition("#")
        assert f"{{ #{anchor} }}" in page(file), name
