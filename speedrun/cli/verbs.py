"""The verbs in the order in which a newcomer needs them, and what `speedrun` alone says.

Standard library and typer only: both screens come in a tenth of a second.
"""

from __future__ import annotations

import io
import os
import select
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TextIO

import typer.core

from speedrun.cli.complete import named_shell
from speedrun.errors import ConfigError, quoted

CLOSED_PIPE = 141  # 128 + SIGPIPE, as a shell counts it

# Every verb with its line, in the order of both screens.
GROUPS: Mapping[str, Mapping[str, str]] = {
    "Train": {
        "train": "train a model: a recipe says how, a track on what",
        "recipes": "how to train: list, show and compare recipes",
        "tracks": "what is raced: list, show and compare tracks",
        "data": "build, inspect, verify and download datasets",
    },
    "Look at runs": {
        "runs": "list runs: recipe, track, loss, date and state",
        "compare": "what differs between runs, and by how much",
        "report": "runs, a race, an ablation or a tuning as one page",
    },
    "Use a trained run": {
        "sample": "write text with it",
        "eval": "its loss on any text",
        "serve": "a page to write with it, and OpenAI's completions call",
        "export": "take the model to other tools",
    },
    "Find out what helps": {
        "race": "how much sooner does each recipe reach the target?",
        "ablate": "which of a recipe's techniques help?",
        "tune": "search the best values of a recipe's keys",
        "ladder": "which optimizer needs the fewest steps?",
        "verify": "is the mean loss of runs below a target?",
        "submit": "check runs against the rules, add them to the leaderboard",
        "leaderboard": "show the leaderboard",
    },
    "This machine and others": {
        "doctor": "what it has, what would be used and why, what is missing",
        "bench": "measure side by side here",
        "plan": "time and memory of a run on GPUs that are not here",
    },
}
FIRST_STEPS: Sequence[tuple[str, str]] = (
    ("speedrun train best --track nano", "train a small GPT here, on your Python's own library"),
    ("speedrun data build notes/ --out mine", "make a dataset of your own text"),
    ("speedrun train best data.dir=mine", "and train on it"),
    ("speedrun race record-02 best --track pico", "race two recipes: which needs fewer tokens?"),
    ("speedrun train --help", "every option of a verb, with an example"),
)


class Verbs(typer.core.TyperGroup):
    """The top of the command line: verbs in groups, and a mistyped one answered in a sentence."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return [verb for verbs in GROUPS.values() for verb in verbs]

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        for title, verbs in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([*verbs.items()])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith("--") and not ctx.resilient_parsing:
            named_shell(ctx, args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        refuse_unknown_verb(self, ctx, args[0])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # of any pipe; typer would end without a word
            leave_closed_pipe()
            raise RuntimeError("a pipe between our own processes was closed") from error


class SomeVerbs(typer.core.TyperGroup):
    """The verbs of a verb, such as `data build`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        refuse_unknown_verb(self, ctx, args[0])
        return super().resolve_command(ctx, args)


def refuse_unknown_verb(group: typer.core.TyperGroup, ctx: Any, word: str) -> None:
    """One sentence with what may have been meant; a shell that asks how to go on gets none."""
    if word in group.commands or word.startswith("-") or ctx.resilient_parsing:
        return
    near = get_close_matches(word, group.commands, n=1)
    inside = [
        name for name, verb in group.commands.items() if word in getattr(verb, "commands", ())
    ]
    hint = ""
    if near:
        hint = f"did you mean {near[0]!r}? "
    elif inside:
        hint = f"did you mean `{ctx.command_path} {inside[0]} {word}`? "
    elif _is_recipe(word):
        hint = f"did you mean `{ctx.command_path} train {word}`? "
    lists = ctx.command_path if ctx.parent is None else f"{ctx.command_path} --help"
    raise ConfigError(f"{ctx.command_path} has no verb {quoted(word)}; {hint}`{lists}` lists them")


def _is_recipe(word: str) -> bool:
    from speedrun.config.files import built_in

    return word in built_in("recipe")


def start_screen() -> str:
    """What to type first, then every verb; wrapped to the terminal."""
    width = min(shutil.get_terminal_size().columns, 100)
    rows: list[tuple[str, Sequence[tuple[str, str]]]] = [("Start here", FIRST_STEPS)]
    rows += [(title, tuple(verbs.items())) for title, verbs in GROUPS.items()]
    lines = [*_wrapped("Speedrun trains GPTs as fast as the hardware allows, measures it honestly "
                       "and shows it.", width)]  # fmt: skip
    for title, pairs in rows:
        lines += ["", title, *_columns(pairs, width)]
    if not shutil.which("speedrun"):
        called = sys.argv[0] if Path(sys.argv[0]).name == "speedrun" else "the whole path"
        lines += ["", *_wrapped(f"speedrun is not on your PATH: write {called}, or activate the "
                                "environment it is installed in", width)]  # fmt: skip
    return "\n".join(lines)


def _columns(pairs: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """Names and their lines side by side, or below each other where that is too narrow."""
    column = max(len(name) for name, _ in pairs) + 2
    for name, text in pairs:
        if width - column - 2 >= 30:
            first, *more = textwrap.wrap(text, width - column - 2)
            yield f"  {name:{column}}{first}"
            yield from (" " * (column + 2) + line for line in more)
        else:
            yield f"  {name}"
            yield from textwrap.wrap(text, max(width, 20), initial_indent="    ",
                                     subsequent_indent="    ")  # fmt: skip


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20))


def leave_closed_pipe() -> None:
    """Where whoever read our output has gone: say no more, not even at the end of the process."""
    closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed(stream)]
    for stream in closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if closed:
        sys.exit(CLOSED_PIPE)


def _is_closed(stream: TextIO) -> bool:
    try:
        stream.flush()
        number = stream.fileno()
    except BrokenPipeError:
        return True
    except io.UnsupportedOperation:  # none of the system's
        return False
    # A large text that failed is not kept, so that there may be nothing to flush.
    asked = select.poll()
    asked.register(number, 0)
    return any(events & select.POLLERR for _, events in asked.poll(0))
