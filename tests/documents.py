"""The project's documents, and what is written in their fences."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def examples(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def copied(folder: Path) -> Path:
    """A folder like a fresh clone: the documents are there, results of commands are not."""
    shutil.copytree(ROOT / "docs", folder / "docs")
    for name in ("README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder)
    return folder


def files(page: Path) -> dict[str, str]:
    """Fences with a title are files that the page has its reader write, by their paths."""
    found = re.findall(
        r'^```\w+ title="([^"]+)"\n(.*?)^```', page.read_text(), re.MULTILINE | re.DOTALL
    )
    return dict(found)


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page has its reader write."""
    for name, text in files(page).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
