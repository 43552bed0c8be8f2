"""What is installed: every file that the package reads, and every package that it imports."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

from speedrun import __version__

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "speedrun"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAMES = {"tomli-w": "tomli_w", "huggingface_hub": "huggingface_hub"}  # where import and name differ


def names(requirements: list[str]) -> set[str]:
    found = {re.split(r"[\[<>=]", requirement)[0] for requirement in requirements}
    return {NAMES.get(name, name) for name in found}


def imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"speedrun"}


def test_files_that_are_no_code_are_installed() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["speedrun"]
    packed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".py"}
    assert {path for path in files - packed if "__pycache__" not in path.parts} == set()


def test_what_is_required_is_imported_and_what_is_imported_is_required() -> None:
    """Packages of the extras are imported where they are used; tests bring them all."""
    used: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        used |= imports(ast.parse(path.read_text(encoding="utf-8")))
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    optional = names([one for extra in extras.values() for one in extra]) - {"speedrun"}
    required = names(project["dependencies"])
    assert required <= used, "nothing imports it: an extra, or nobody, needs it"
    assert used - required - optional == {"pydantic_core"}  # which pydantic brings


def test_everything_has_an_exact_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line}
    project = PROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    needed = names([one for group in groups for one in group]) - {"speedrun"}
    assert needed <= pinned


def test_the_version_is_said_once_and_its_changes_are_told() -> None:
    assert "version" not in PROJECT["project"], "speedrun/__init__.py has it"
    newest = re.search(r"^## (\S+), \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] == __version__
