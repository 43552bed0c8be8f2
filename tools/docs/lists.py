"""Lists as a forge reads them: there a list may follow a paragraph without an empty line between.

Python-Markdown, which the site is made with, would take its items for more of the paragraph.
"""

from __future__ import annotations

import re

from tools.docs.links import FENCE

ITEM = re.compile(r"(?:[-*]|1\.) ")
PARAGRAPH = re.compile(r"(?!$|\s|[-*|>#]|\d+\. )")  # a line that could go on with what follows


def spaced(markdown: str) -> str:
    """The text with an empty line before each list that follows a paragraph."""
    parts = FENCE.split(markdown)
    return "".join(part if i % 2 else _spaced(part) for i, part in enumerate(parts))


def _spaced(text: str) -> str:
    lines: list[str] = []
    inside = False  # of a list, whose items may go on without being indented
    for line in text.split("\n"):
        if not line.strip():
            inside = False
        elif ITEM.match(line):
            if not inside and lines and PARAGRAPH.match(lines[-1]):
                lines.append("")
            inside = True
        lines.append(line)
    return "\n".join(lines)
