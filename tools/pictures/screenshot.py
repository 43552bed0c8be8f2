"""The page of a race as README shows it: run here, made by `speedrun report`, seen by Chromium."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
RACE = (
    "record-09", "record-18", "best", "--track", "pico", "--seeds", "2", "--jobs", "0",
    "--set", "validation.every=8", "--set", "validation.tokens=8192",
)  # fmt: skip
SIZE = (1000, 1105)  # of the part of the page that is shown
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--no-first-run", "--disable-background-networking", "--virtual-time-budget=4000",
)  # fmt: skip


def make(out: Path, words: Sequence[str] = RACE) -> str:
    """The picture of a new race's page, or why there is none; says which in one sentence."""
    if CHROMIUM is None:
        return f"{out} was left as it is: the page's picture needs Chromium, which is not installed"
    with TemporaryDirectory() as folder:
        place = Path(folder)
        page = place / "page.html"
        speedrun(place, "race", *words, "--out", str(place / "race"))
        speedrun(place, "report", str(place / "race"), "--out", str(page))
        photograph(page, out)
    return str(out)


def speedrun(folder: Path, *words: str) -> None:
    """A command as a user gives it; what it says goes to the terminal."""
    root = Path(__file__).parent.parent.parent
    paths = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    subprocess.run([sys.executable, "-m", "speedrun", *words], cwd=folder, check=True,
                   env={**os.environ, "PYTHONPATH": paths})  # fmt: skip


def photograph(page: Path, out: Path) -> None:
    """The top of a page, in light colours."""
    assert CHROMIUM is not None
    with TemporaryDirectory() as profile:
        subprocess.run(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", f"--window-size={SIZE[0]},{SIZE[1]}",
             f"--screenshot={out}", page.as_uri()],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120,
        )  # fmt: skip
