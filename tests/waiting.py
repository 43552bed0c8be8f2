"""Waiting for what can be seen: no test passes or fails by how fast the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 240.0  # seconds until what has not happened will not; just below pytest's own limit


def wait_for(happened: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds:.0f} s"
        time.sleep(0.01)
