"""Calling code that a recipe names (config/code.py): what goes wrong in it, in a sentence."""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speedrun.config.code import UsedCode
from speedrun.errors import ConfigError, SpeedrunError, quoted


def call(key: str, used: UsedCode, function: Any, *given: Any, doing: str) -> Any:
    """With the arguments that the table `key` states; what its signature lacks is told first."""
    what = f"{key} ({used.use})"
    if not callable(function):
        raise ConfigError(f"{what} is {quoted(function)}: name a class or a function")
    try:
        takes = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin
        takes = None
    if takes is not None:
        try:
            takes.bind(*given, **used.args)
        except TypeError as error:
            stated = ", ".join(used.args) or "none"
            raise ConfigError(
                f"{what} takes {takes} and is given {len(given)} by position and those that "
                f"{key}.args states ({stated}): {error}"
            ) from None
    with telling(what, function, doing):
        return function(*given, **used.args)


@contextmanager
def telling(what: str, function: Any, doing: str) -> Iterator[None]:
    """Nothing but this code can fail inside."""
    try:
        yield
    except SpeedrunError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(told(what, error, function, doing)) from error


def told(what: str, error: BaseException, function: Any, doing: str) -> str:
    where, line = line_of(error, function)
    at = f", in {where}" if where else ""
    return f"{what} fails {doing}{at}: {reason(error, line)}; mend it"


def gist(error: BaseException, function: Any) -> str:
    """Type, message and place of an error that came out of this code."""
    where, line = line_of(error, function)
    return f"{reason(error, line)} ({where})" if where else reason(error, line)


def reason(error: BaseException, line: str = "") -> str:
    """Type and message; the line stands for a message that is not there, as of most asserts."""
    try:
        text = re.sub(r"\s+", " ", str(error))[:300].rstrip(".")
    except Exception:  # of a class of the user's own, whatever its __str__ does
        text = ""
    return f"{type(error).__name__}: {text or line}".removesuffix(": ")


def line_of(error: BaseException, function: Any) -> tuple[str, str]:
    """Place and text of the innermost line of this code's own that an error came through.

    Both are empty if there is none. Lines of torch tell nobody anything.
    """
    package = str(getattr(function, "__module__", "")).partition(".")[0]
    where, line, trace = "", "", error.__traceback__
    while trace is not None and package != "torch":
        frame, number = trace.tb_frame, trace.tb_lineno
        if str(frame.f_globals.get("__name__")).partition(".")[0] == package:
            file = frame.f_code.co_filename
            where = f"line {number} of {Path(file).name}"
            line = linecache.getline(file, number, frame.f_globals).strip()
        trace = trace.tb_next
    return where, line
