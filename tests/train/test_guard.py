"""A sink may raise what it likes: that is told, the others are written, the run goes on."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from speedrun.train.guard import LONGEST, gist
from tests.train.heard import Heard, Make, quiet_log


class Strange(BaseException):
    """No Exception, as a library may have them."""


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


ERRORS = (
    (ValueError("step\n  is\tnot \x1b[1ma number"), "ValueError: step is not [1ma number"),
    (SystemExit(3), "SystemExit: 3"),
    (Strange("gone"), "Strange: gone"),
    (ConnectionResetError("Connection lost"), "ConnectionResetError: Connection lost"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "OSError: No space left on device"),
    (UnspeakableError(), "UnspeakableError"),
)


class Keeping:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, kind: str, **values: Any) -> None:
        assert kind
        self.steps.append(values["step"])


class Failing(Keeping):
    """Raises at some steps."""

    def __init__(self, error: BaseException, steps: set[int]) -> None:
        super().__init__()
        self._error, self._at = error, steps

    def log(self, kind: str, **values: Any) -> None:
        if values["step"] in self._at:
            raise self._error
        super().log(kind, **values)


@pytest.mark.parametrize(("error", "words"), ERRORS, ids=[type(e).__name__ for e, _ in ERRORS])
def test_whatever_a_sink_raises_is_told_once_and_later_sinks_are_written(
    tiny: Make, error: BaseException, words: str
) -> None:
    failing, after, heard = Failing(error, {2, 3, 4}), Keeping(), Heard()
    log = quiet_log(tiny(), failing, after, display=heard)
    for step in range(6):
        log.event("note", step=step)
    assert heard.lines == [f"Failing cannot be written: {words}; going on"]
    assert failing.steps == [0, 1, 5]  # it is tried again
    assert after.steps == [0, 1, 2, 3, 4, 5]


def test_what_the_run_itself_has_to_say_is_said_beside_a_failing_sink(tiny: Make) -> None:
    heard = Heard()
    log = quiet_log(tiny(), Failing(SystemExit(1), {4}), display=heard)
    log.event("rewind", step=4, batch=9)
    assert len(heard.lines) == 2
    assert "back to the checkpoint of step 4" in heard.lines[1]


def test_a_sink_that_fails_now_and_then_does_not_flood_the_display(tiny: Make) -> None:
    heard = Heard()
    log = quiet_log(tiny(), Failing(ValueError("odd"), {*range(1, 200, 2)}), display=heard)
    for step in range(200):
        log.event("note", step=step)
    assert len(heard.lines) == 7  # the 1st, 2nd, 4th ... 64th time


def test_records_that_a_sink_passes_over_are_no_sign_that_it_works(tiny: Make) -> None:
    heard = Heard()
    log = quiet_log(tiny(), Failing(ValueError("odd"), {1}), display=heard)
    for _ in range(10):
        log.event("val", step=1)
        log.event("peak", step=2)
    assert len(heard.lines) == 1


def test_ctrl_c_goes_through(tiny: Make) -> None:
    log = quiet_log(tiny(), Failing(KeyboardInterrupt(), {0}))
    with pytest.raises(KeyboardInterrupt):
        log.event("note", step=0)
    log.event("note", step=1)  # and leaves nothing locked


def test_a_long_message_is_cut() -> None:
    line = gist(ValueError("word " * 1000))
    assert line.startswith("ValueError: word word")
    assert len(line) == LONGEST + 3
