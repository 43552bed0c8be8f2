"""All pictures of README and docs, and the tables that stand beside them: `make pictures`.

What is drawn from the code and the committed results is SVG, the same everywhere, and a test draws
it again. The page of a race is a screenshot of one that is run here, which takes a few minutes and
needs Chromium; without it that one picture is left as it is.

    python -m tools.pictures.make            all of them
    python -m tools.pictures.make --drawn    those that need no run
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from tools.pictures import mask, optimizers, race, records, schedules, screenshot, step, way

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "pictures"
RECORDS = ROOT / "docs" / "records.md"

DRAWN: dict[str, Callable[[], str]] = {
    "mask.svg": mask.draw,
    **({"optimizers.svg": optimizers.draw} if optimizers.tables() else {}),
    "race.svg": race.draw,
    "records.svg": records.draw,
    "schedules.svg": schedules.draw,
    "step.svg": step.draw,
    "way.svg": way.draw,
}
PAGE = FOLDER / "page.png"
# A table of docs/records.md: a comment that says which records, and the rows up to a blank line.
TABLE = re.compile(r"(?<=<!-- records (\d\d) to (\d\d) -->\n).*?(?=\n\n)", re.DOTALL)


def with_tables(page: str) -> str:
    """The page of the records, its tables written anew."""
    return TABLE.sub(lambda found: records.table(int(found[1]), int(found[2])), page)


def main(*words: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DRAWN.items():
        (FOLDER / name).write_text(draw())
        print(FOLDER / name)
    RECORDS.write_text(with_tables(RECORDS.read_text()))
    print(RECORDS)
    if "--drawn" not in words:
        print(screenshot.make(PAGE))


if __name__ == "__main__":
    main(*sys.argv[1:])
