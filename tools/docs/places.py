"""Where the site has what a document links to."""

from __future__ import annotations

from pathlib import Path

from tools.docs.links import from_page, in_repository

AT_ROOT = ("CONTRIBUTING.md", "CHANGELOG.md")  # documents that are pages and not in docs/
FOLDERS = {"docs/results": "results/index.md"}
STANDS_FOR = {"README.md": "index.md"}


def place_of(path: str, root: Path) -> str | None:
    """The page, inside docs/, that shows a file of the repository; None if there is none."""
    if path in AT_ROOT:
        return path
    known = FOLDERS.get(path) or STANDS_FOR.get(path)
    if known:
        return known
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"code/{path}.md" if (root / path).is_file() else None


def followed(link: str, document: str, root: Path) -> str:
    """A link of a document as a link of the site; one that leads nowhere is left for mkdocs."""
    place = place_of(in_repository(link, document), root)
    if place is None:
        return link
    anchor = link.partition("#")[2]
    if place.startswith("code/") and anchor.startswith("L"):
        anchor = f"__codelineno-0-{anchor.removeprefix('L')}"  # a forge's name for a line
    here = document.removeprefix("docs/")
    return from_page(place, here) + (f"#{anchor}" if anchor else "")
