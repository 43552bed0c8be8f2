"""Tables and sizes for the terminal; plain aligned text when piped.

rich is imported by what draws with it: a run or a report that is piped needs none of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


# What a terminal obeys instead of showing it: control characters but for tab and line end, other
# line ends, marks that turn the direction of writing round; and halves of characters.
_OBEYED = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028\\u2029\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)
MOST = 1200  # characters of a message: one that quotes a value of megabytes says no more than this


def printable(text: str) -> str:
    """A text of somebody else's, to be shown: what a terminal would obey is written out."""
    return _OBEYED.sub(lambda found: _escaped(found[0]), text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def as_written(text: str) -> str:
    """A text for standard output: to the byte for another program, `printable` on a terminal."""
    return printable(text) if sys.stdout.isatty() else text


def sentence(text: str) -> str:
    """A message as it is printed, one line: its beginning says what is wrong, its end what to do.

    Whatever it quotes is told apart by eye, spaces that are none and line ends among it.
    """
    shown = "".join(c if c.isprintable() else _escaped(c) for c in text)
    if len(shown) <= MOST:
        return shown
    end = MOST // 3
    return f"{shown[: MOST - end]} [... {len(shown) - MOST:,} characters ...] {shown[-end:]}"


def console() -> Console:
    """Piped output is not wrapped to a terminal that is not there."""
    from rich.console import Console

    found = Console(highlight=False, markup=False)
    return found if found.is_terminal else Console(highlight=False, markup=False, width=160)


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    console().print(table)


def size_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count >= 100 or unit == "B" else f"{count:.1f} {unit}"
