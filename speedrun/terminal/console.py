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

NARROW = 60  # characters: below this, a wide table is printed row by row


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

    class Ours(Console):
        def on_broken_pipe(self) -> None:
            raise  # for the end of the program to say, as of any other output

    found = Ours(highlight=False, markup=False)
    return found if found.is_terminal else Ours(highlight=False, markup=False, width=160)


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    from rich.table import Table
    from rich.text import Text

    texts = [[printable(str(cell)) for cell in row] for row in rows]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(name, overflow="fold")
    for row in texts:
        table.add_row(*map(Text, row))
    where = console()
    columns = zip(header, *texts, strict=True)
    widths = [max(map(len, column)) + 2 for column in columns]
    if not where.is_terminal:
        where.width = max(where.width, sum(widths))
    if len(header) > 2 and where.width < min(NARROW, sum(widths)):
        _print_below_each_other(where, header, texts)
    else:
        where.print(table)


def _print_below_each_other(
    where: Console, header: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Where columns would be a few characters wide: a block for each row."""
    from rich.text import Text

    for number, (first, *cells) in enumerate(rows):
        where.print(Text(f"\n{first}" if number else first))
        for name, cell in zip(header[1:], cells, strict=True):
            where.print(Text(f"  {name}: {cell}"))


def size_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count >= 100 or unit == "B" else f"{count:.1f} {unit}"
