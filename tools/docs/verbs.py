"""The page of every verb, from what the command line itself is declared by.

Verbs, words and options are read off the functions that typer calls, so the page says what
`--help` says and a verb cannot be left out of it.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from tools.docs.markdown import code, table

ABOUT = """\
Every command, generated from the command line itself: `speedrun VERB --help` says the same. A word
in capitals stands for a value of yours."""
KINDS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


@dataclass(frozen=True)
class Word:
    """An argument or an option of a verb."""

    shown: str  # as it is written on the command line
    default: str
    meaning: str
    is_option: bool


@dataclass(frozen=True)
class Verb:
    """One command: `path` are its words, without `speedrun`."""

    path: tuple[str, ...]
    about: str
    words: tuple[Word, ...]
    examples: tuple[str, ...]

    @property
    def name(self) -> str:
        return " ".join(("speedrun", *self.path))

    @property
    def anchor(self) -> str:
        return "-".join(self.path)


# typer's own, which no function of ours declares.
COMPLETION = Word(
    "--install-completion", "off", "Teach this shell verbs, recipes, tracks, keys and runs.", True
)


def verbs(app: typer.Typer, path: tuple[str, ...] = ()) -> Iterator[Verb]:
    """Every verb below an app, in the order in which they are declared."""
    callback = app.registered_callback
    if path and callback and callback.invoke_without_command is True:
        yield _verb(path, callback.callback, _given(app.info.help), "")
    for command in app.registered_commands:
        assert command.callback is not None
        if not command.hidden:
            name = command.name or command.callback.__name__.replace("_", "-")
            about = _given(command.help) or inspect.getdoc(command.callback) or ""
            yield _verb((*path, name), command.callback, about, _given(command.epilog))
    for group in app.registered_groups:
        assert group.typer_instance is not None
        if group.hidden is not True:
            below = (*path, group.name) if isinstance(group.name, str) else path
            yield from verbs(group.typer_instance, below)


def options_of_all(app: typer.Typer) -> list[Word]:
    """The options that stand before any verb."""
    callback = app.registered_callback
    return _words(callback.callback) if callback and callback.callback else []


def _given(text: Any) -> str:
    """What was declared; typer has a marker of its own for what was not."""
    return text if isinstance(text, str) else ""


def _verb(
    path: tuple[str, ...], function: Callable[..., Any] | None, about: str, epilog: str
) -> Verb:
    assert function is not None
    examples = re.findall(r"Example:\s+(.+)", epilog)
    return Verb(path, about, tuple(_words(function)), tuple(examples))


def _words(function: Callable[..., Any]) -> list[Word]:
    hints = get_type_hints(function, include_extras=True)
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        if get_origin(hints[name]) is not Annotated:
            assert hints[name] is typer.Context, f"{function.__qualname__}: {name} has no help"
            continue
        kind, *notes = get_args(hints[name])
        [info] = [note for note in notes if isinstance(note, ArgumentInfo | OptionInfo)]
        if not info.hidden:
            found.append(_word(name, kind, info, parameter.default))
    return found


def _word(name: str, kind: Any, info: ArgumentInfo | OptionInfo, default: Any) -> Word:
    assert info.help, f"{name} has no help"
    bare, several = _bare(kind)
    if isinstance(info, ArgumentInfo):
        shown = info.metavar or name.upper() + ("..." if several else "")
        meaning = info.help + _range(info)
        return Word(shown, _default(default, info), _words_as_code(meaning), is_option=False)
    # In an annotation the first name of an option stands where else its default would.
    named = [one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str)]
    names = ", ".join(named or [f"--{name.replace('_', '-')}"])
    shown = names if bare is bool else f"{names} {info.metavar or KINDS[bare]}"
    again = " May be given several times." if several and "several" not in info.help else ""
    meaning = _words_as_code(info.help + _range(info) + again)
    return Word(shown, _default(default, info), meaning, is_option=True)


def _words_as_code(text: str) -> str:
    """Help with the options it names set as code."""
    return re.sub(r"(?<![\w`-])--[a-z][a-z-]*", lambda match: code(match.group()), text)


def _bare(kind: Any) -> tuple[type, bool]:
    """The type of one value, and whether there may be several of them."""
    if get_origin(kind) in (Union, types.UnionType):
        [kind] = [one for one in get_args(kind) if one is not type(None)]
    if get_origin(kind) is list:
        return get_args(kind)[0], True
    return kind, False


def _default(default: Any, info: ArgumentInfo | OptionInfo) -> str:
    if default is inspect.Parameter.empty:
        return "required"
    if isinstance(info.show_default, str):
        return code(info.show_default)
    if default is None or default == "":
        return ""
    return "off" if default is False else code(str(default))


def _range(info: ArgumentInfo | OptionInfo) -> str:
    if info.min is None and info.max is None:
        return ""
    if info.max is None:
        return "" if info.min == 0 else f" At least {info.min:g}."
    return f" From {info.min or 0:g} to {info.max:g}."


def page(app: typer.Typer) -> str:
    """The page of the reference."""
    found = list(verbs(app))
    parts = [
        "# Verbs",
        ABOUT,
        table(
            ("verb", "what it does"),
            [(f"[{code(verb.name)}](#{verb.anchor})", _first_line(verb.about)) for verb in found],
        ),
        "Before any verb, or without one:",
        _options([*options_of_all(app), COMPLETION]),
        *(_entry(verb) for verb in found),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _entry(verb: Verb) -> str:
    arguments = [word for word in verb.words if not word.is_option]
    usage = " ".join(
        (verb.name, *(w.shown if w.default == "required" else f"[{w.shown}]" for w in arguments))
    )
    parts = [f"## {verb.name} {{ #{verb.anchor} }}", _words_as_code(verb.about)]
    parts += [f"``` {{ .text .usage }}\n{usage}\n```", _options(list(verb.words))]
    parts += [f"Example: {code(example)}" for example in verb.examples]
    return "\n\n".join(part for part in parts if part)


def _options(words: list[Word]) -> str:
    rows = [(code(word.shown), word.meaning, word.default) for word in words]
    return table(("word", "what it does", "default"), rows) if rows else ""
