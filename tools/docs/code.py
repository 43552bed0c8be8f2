"""Pages that show files of the repository: sources that documents name, and lists of files.

A document names a source by a link, or as code: `loader.py`, `data/loader.py`, or with what to look
for in it, `data/loader.py: rows_of`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tools.docs import links, places

NAME = r"((?:[\w-]+/)*[\w-]+\.(?:py|cpp|h|js))(?:: ([A-Za-z_][\w.]*))?"
MENTION = re.compile(rf"`({NAME})`")
LANGUAGES = {".py": "python", ".toml": "toml", ".cpp": "cpp", ".h": "cpp", ".js": "js"}


def pages_named(documents: Mapping[str, str], root: Path) -> dict[str, str]:
    """A page for every source file that a document links to or names, by its place on the site."""
    named = {place.partition("#")[0] for place in mentions(documents, root).values()}
    for document, text in documents.items():
        for link in links.targets(text):
            place = places.place_of(links.in_repository(link, document), root)
            if place is not None and place.startswith("code/"):
                named.add(place)
    paths = {place: place.removeprefix("code/").removesuffix(".md") for place in sorted(named)}
    return {
        place: source_page(path, (root / path).read_text(encoding="utf-8"))
        for place, path in paths.items()
    }


def mentions(documents: Mapping[str, str], root: Path) -> dict[str, str]:
    """By each source's name as documents write it: its place, with the line of what is meant."""
    found: dict[str, str] = {}
    for text in documents.values():
        for name, path, symbol in MENTION.findall(text):
            whole = _whole_path(path, root)
            if whole is None:
                continue
            line = line_of(root / whole, symbol) if symbol else None
            found[name] = f"code/{whole}.md" + (f"#__codelineno-0-{line}" if line else "")
    return found


def _whole_path(path: str, root: Path) -> str | None:
    """The one file that a path means, which may leave out folders; None if there are others."""
    exact = [one for one in (path, f"speedrun/{path}") if "/" in path and (root / one).is_file()]
    if exact:
        return exact[0]
    ends = [one for one in _sources(root) if one.endswith(f"/{path}")]
    return ends[0] if len(ends) == 1 else None


@cache
def _sources(root: Path) -> tuple[str, ...]:
    files = (root / "speedrun").rglob("*")
    return tuple(path.relative_to(root).as_posix() for path in files if path.suffix in LANGUAGES)


def line_of(path: Path, symbol: str) -> int | None:
    """Where a Python file defines `name` or `Class.name`."""
    if path.suffix != ".py":
        return None
    nodes: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    line = None
    for part in symbol.split("."):
        defined = dict(_definitions(nodes))
        if part not in defined:
            return None
        node = defined[part]
        line, nodes = node.lineno, getattr(node, "body", [])
    return line


def _definitions(nodes: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign):
            yield from ((t.id, node) for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node


def source_page(path: str, text: str) -> str:
    """One file with numbered lines, each of which can be linked to."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    fence = "~" * 8  # which no file of ours has
    body = f"{fence} {{ .{language} linenums=1 }}\n{text.rstrip()}\n{fence}"
    return f"---\nhide: [toc]\n---\n\n# `{path}`\n\n{body}\n"


def folder_page(folder: Path) -> str:
    """The files of a folder, to be fetched one by one."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    rows = "\n".join(f"- [{name}]({name})" for name in names)
    return f"# Files in `docs/{folder.name}`\n\n{rows}\n"
