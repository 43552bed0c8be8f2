"""A mistake in how a verb was called, as one sentence that says what to write instead.

typer words these for a programmer and puts a usage box around them. Here each names the verb, what
was given, and the next thing to try.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

import typer

from speedrun.errors import ConfigError, quoted, shortened

# What typer raises for a misuse. Its place depends on the version of typer, this name does not.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

# Options of `train` that people give to a verb which has them by another name.
INSTEAD: Mapping[tuple[str, str], str] = {
    ("race", "--steps"): "--budget N",
    ("ablate", "--steps"): "--set train.steps=N",
    ("tune", "--steps"): "--set train.steps=N",
}
OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)+=.*", re.DOTALL)


def refuse_overrides(path: str, words: Sequence[str]) -> None:
    """`train` takes key=value after its recipe; a verb of many recipes takes it by an option."""
    given = [word for word in words if OVERRIDE.fullmatch(word) and not word.endswith(".toml")]
    if given:
        raise ConfigError(f"{path}: {_as_options(given)}")


def _as_options(given: Sequence[str]) -> str:
    written = " ".join(f"--set {shlex.quote(word)}" for word in given)
    named = ", ".join(map(quoted, given))
    return f"{shortened(named)} is no recipe: write {shortened(written)} to set it for every run"


def misuse(error: Any, words: Sequence[str]) -> str:
    """`error` is a `UsageError`, `words` are those of the command line."""
    context, kind = error.ctx, type(error).__name__
    path = context.command_path if context else "speedrun"
    param = getattr(error, "param", None)
    see = f"`{path if context else 'speedrun VERB'} --help` lists what it takes"
    if kind == "NoSuchOption":
        return f"{path} has no option {quoted(error.option_name)}; {_nearest(error, path)}{see}"
    if kind == "MissingParameter" and param is not None:
        what = _what(param)
        return f"{path} needs {_name(param)}{what}; {_example(context) or see}"
    if kind == "BadOptionUsage" and "argument" in error.message:
        return f"{error.option_name} needs a value after it; {see}"
    reason = _reason(error.message)
    if param is not None:
        given = _given(param, words)
        return f"{path}: {_name(param)}{given} cannot be used: {reason}{_what(param)}"
    if "unexpected extra argument" in reason and _takes_set(context):
        plain = [word for before, word in pairwise(["", *words]) if not before.startswith("-")]
        if overrides := [word for word in plain if OVERRIDE.fullmatch(word)]:
            return f"{path}: {_as_options(overrides)}"
    return f"{path}: {reason}; {see}"


def _reason(message: str) -> str:
    """typer's, in our words where its own are a parser's."""
    for kind in ("integer", "number"):
        if f"valid {kind}" in message:
            return f"it is not {'a whole' if kind == 'integer' else 'a'} number"
    message = message.rstrip(".").replace("Input should be", "it must be")
    return message[:1].lower() + message[1:]


def _takes_set(context: Any) -> bool:
    return context is not None and any("--set" in param.opts for param in context.command.params)


def _nearest(error: Any, path: str) -> str:
    if instead := INSTEAD.get((path.split()[-1], error.option_name)):
        return f"write {instead}; "
    known = [name for param in error.ctx.command.params for name in param.opts] if error.ctx else []
    near = get_close_matches(error.option_name, [*(error.possibilities or ()), *known], n=1)
    return f"did you mean {near[0]}? " if near else ""


def _name(param: Any) -> str:
    """--option, or the argument as the usage line calls it."""
    if param.param_type_name == "option":
        return str(max(param.opts, key=len))
    return str(param.metavar or param.name.upper())


def _what(param: Any) -> str:
    text = (param.help or "").rstrip(".")
    return f" ({text[:1].lower()}{text[1:]})" if text else ""


def _example(context: Any) -> str:
    text = (context.command.epilog or "") if context else ""
    return f"for example: {text.removeprefix('Example:').strip()}" if "Example:" in text else ""


def _given(param: Any, words: Sequence[str]) -> str:
    """What stands after the option on the command line."""
    for name in param.opts:
        for at, word in enumerate(words):
            if word == name and at + 1 < len(words):
                return f" {quoted(words[at + 1])}"
            if word.startswith(f"{name}="):
                return f" {quoted(word.removeprefix(f'{name}='))}"
    return ""
