"""Calls into code that is not ours, none of which may end a run.

A logger is somebody else's library, and may raise whatever it likes: its own errors, SystemExit, or
what is no Exception at all. Ctrl-C alone still goes through: that is the user's word.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

LONGEST = 200  # characters of somebody else's message


class Sink(Protocol):
    """Where records go."""

    def log(self, kind: str, **values: Any) -> None: ...


def attempt(action: Callable[[], object]) -> BaseException | None:
    """Do it; gives what it raised, if it did."""
    try:
        action()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error
    return None


def gist(error: BaseException) -> str:
    """An error's type and message, short and in one line."""
    try:
        text = (isinstance(error, OSError) and error.strerror) or str(error)
    except Exception:  # an error that cannot even be told
        text = ""
    words = "".join(letter if letter.isprintable() else " " for letter in text).split()
    line = " ".join([f"{type(error).__name__}:", *words]).removesuffix(":")
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."


class Guarded:
    """A sink that only ever notes why it failed: when it begins to, and not every time it does."""

    def __init__(self, name: str, sink: Sink, note: Callable[[str], None]) -> None:
        self._name, self._sink, self._note = name, sink, note
        self._failing: str | None = None  # the kind of record it fails at
        self._begun = 0  # how often it began to
        self._logging = threading.Lock()  # the writer of checkpoints logs too

    def log(self, kind: str, **values: Any) -> None:
        with self._logging:
            error = attempt(lambda: self._sink.log(kind, **values))
            begins = error is not None and self._failing is None
            if begins:
                self._failing, self._begun = kind, self._begun + 1
            elif error is None and kind == self._failing:  # others it may not even look at
                self._failing = None
        # One that fails now and then begins to again and again: told the 1st, 2nd, 4th, 8th time.
        if error is not None and begins and self._begun & (self._begun - 1) == 0:
            self._note(f"{self._name} cannot be written: {gist(error)}; going on")
