"""Pages that show files of the repository: sources that documents link to, and lists of files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tools.docs import links, places

LANGUAGES = {".py": "python", ".toml": "toml", ".cpp": "cpp", ".h": "cpp", ".js": "js"}


def pages_linked(documents: Mapping[str, str], root: Path) -> dict[str, str]:
    """A page for every source file that a document links to, by its place on the site."""
    pages: dict[str, str] = {}
    for document, text in documents.items():
        for link in links.targets(text):
            path = links.in_repository(link, document)
            place = places.place_of(path, root)
            if place is not None and place.startswith("code/"):
                pages[place] = source_page(path, (root / path).read_text(encoding="utf-8"))
    return pages


def source_page(path: str, text: str) -> str:
    """One file with numbered lines, each of which can be linked to."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    fence = "~" * 8  # which no file of ours has
    return f"# `{path}`\n\n{fence} {{ .{language} linenums=1 }}\n{text.rstrip()}\n{fence}\n"


def folder_page(folder: Path) -> str:
    """The files of a folder, to be fetched one by one."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    rows = "\n".join(f"- [{name}]({name})" for name in names)
    return f"# Files in `docs/{folder.name}`\n\n{rows}\n"
