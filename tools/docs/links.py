"""Links of the documents, from how a forge follows them to how the site does.

A document is read in two places. On a forge a link goes to a file or a folder of the repository;
the site has the pages of docs/ alone, and everything else must be brought into it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable

LINK = re.compile(r"(!?\[[^\]\n]*\]\()([^)\s]+)(\))")
FENCE = re.compile(r"(^```.*?^```\s*?$)", re.MULTILINE | re.DOTALL)


def rewrite(markdown: str, target: Callable[[str], str]) -> str:
    """The text with every link's target replaced, but for those in fences and to other sites."""

    def replaced(match: re.Match[str]) -> str:
        opening, link, closing = match.groups()
        elsewhere = "://" in link or link.startswith(("#", "mailto:"))
        return match.group() if elsewhere else f"{opening}{target(link)}{closing}"

    parts = FENCE.split(markdown)
    return "".join(part if i % 2 else LINK.sub(replaced, part) for i, part in enumerate(parts))


def targets(markdown: str) -> list[str]:
    """Where a document's links go, in order."""
    found: list[str] = []
    rewrite(markdown, lambda link: found.append(link) or link)  # type: ignore[func-returns-value]
    return found


def in_repository(link: str, page: str) -> str:
    """The path from the root of the repository that a link on a document there means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link.partition("#")[0]))


def from_page(place: str, page: str) -> str:
    """The link from one page of the site to another, both as paths inside docs/."""
    return posixpath.relpath(place, posixpath.dirname(page) or ".")
