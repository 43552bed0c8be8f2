"""Calling code that a recipe names (config/code.py): what goes wrong in it, in a sentence."""

from __future__ import annotations

import inspect
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
    where = line_of(error, function)
    return f"{what} fails {doing}{f', in {where}' if where else ''}: {reason(error)}; mend it"


def gist(error: BaseException, function: Any) -> str:
    """Type, message and place of an error that came out of this code."""
    where = line_of(error, function)
    return f"{reason(error)} ({where})" if where else reason(error)


def reason(error: BaseException) -> str:
    try:
        text = re.sub(r"\s+", " ", str(error))[:300].rstrip(".")
    except Exception:  # of a class of the user's own, whatever its __str__ does
        text = ""
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def line_of(error: BaseException, function: Any) -> str:
    """The innermost line of this code's own that an error came through; empty if there is none.

    Lines of torch tell nobody anything.
    """
    package = str(getattr(function, "__module__", "")).partition(".")[0]
    found, trace = "", error.__traceback__
    while trace is not None and package != "torch":
        frame = trace.tb_frame
        if str(frame.f_globals.get("__name__")).partition(".")[0] == package:
            found = f"line {trace.tb_lineno} of {Path(frame.f_code.co_filename).name}"
        trace = trace.tb_next
    return found
