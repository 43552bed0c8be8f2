"""The table of optimizers that were tried: it says what was found, and nothing else."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest

from tests.optim import foreign as toys
from tools.optimizers.tried import PAGE, RESULTS, ring, row, shortened, tried, with_section


def test_the_page_shows_what_was_found() -> None:
    page = PAGE.read_text()
    assert with_section(page, json.loads(RESULTS.read_text())) == page


def test_a_class_is_given_what_its_refusal_asks_for() -> None:
    uses = {
        "SignMomentum": {},
        "Drawing": {"random": True},
        "OwnRate": {"scheduled": False},
    }
    found = [tried(f"toys:{name}", getattr(toys, name)) for name in uses]
    assert [one["needs"] for one in found] == [*uses.values()]
    assert not any(one["refused"] for one in found)
    refused = tried("toys:NeedsClosure", toys.NeedsClosure)
    assert refused["refused"] == "needs a closure"
    line = row("toys", {"version": "1", "classes": [*found, refused]})
    assert line == (
        "| `toys` | 1 | 3 of 4 | SignMomentum; with `random = true`: Drawing; "
        "with `scheduled = false`: OwnRate |"
    )


def test_a_reason_has_no_name_place_or_advice() -> None:
    sentence = "a:B (for hidden) cannot be made: ValueError: no (line 7 of b.py); it takes lr, eps"
    assert shortened(sentence) == "cannot be made: ValueError: no"


def test_a_class_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(toys.SignMomentum):
        def direction(self, *_: Any) -> Any:
            time.sleep(9)

    monkeypatch.setattr("tools.optimizers.tried.SECONDS", 1)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        assert tried("toys:Slow", Slow)["refused"] == "takes more than 1 s to try"
    finally:
        signal.signal(signal.SIGALRM, before)
