"""The project's documents, and what is written in their fences."""

from __future__ import annotations

import re
import shutil
import subprocess
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


def followed(page: Path, folder: Path) -> bool:
    """Do in a clone what a page says: write its files, make its changes of the package.

    The answer is whether there are any: then the package is that of the folder.
    """
    changes = examples(page, "diff")
    if changes:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "speedrun", folder / "speedrun", ignore=ignored)
    for name, text in files(page).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for change in changes:
        subprocess.run(["git", "apply", "-"], input=change, text=True, cwd=folder, check=True)
    return bool(changes)
