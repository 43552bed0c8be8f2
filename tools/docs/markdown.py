"""Pieces of Markdown that the generated pages are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SENTENCES = ("what it does", "becomes")  # columns whose cells need no name to be understood


def code(text: str) -> str:
    """Text as code; a bar would end a cell of a table."""
    return f"`{text}`".replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that narrow screens show as a list of entries (docs/stylesheets/site.css).

    There it has no head, so a cell that is not a sentence carries the name of its column along.
    """
    labels = ["", *("" if name in SENTENCES else _label(name) for name in head[1:])]
    cells = [
        [f"{label}{cell}" if cell else "" for label, cell in zip(labels, row, strict=True)]
        for row in rows
    ]
    lines = [head, ["---"] * len(head), *cells]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f'<div class="entries" markdown>\n\n{text}\n\n</div>'


def _label(name: str) -> str:
    return f'<span class="label">{name}: </span>'
