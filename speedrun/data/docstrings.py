"""English prose that is on every machine: the docstrings of Python's library and of our packages.

The packages are those that running needs, so whoever can train has them, at the versions of the
constraints file. Their source is parsed, never imported. Of a docstring its paragraphs of sentences
are kept: tables, examples and formulas are left out, and so is a paragraph that stood before, for
packages say many things more than once. A docstring with enough left is one document, and those of
one file stay on one side of a split.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path

from speedrun.data.readers import Document
from speedrun.errors import DataError

DOCSTRINGS = "docstrings"
# All of them come with torch, scipy, pydantic and tokenizers.
PACKAGES = ("huggingface_hub", "mpmath", "networkx", "numpy", "pydantic", "scipy", "sympy", "torch")
LEFT_OUT = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "testing", "idlelib"}
LEAST_WORDS = 8  # of a paragraph
LEAST_BYTES = 100  # of a document
PLAIN = 0.9  # least share of letters, spaces and the marks of sentences in a paragraph
_WORD = re.compile(r"[A-Za-z]{2,}")
_NOT_PLAIN = re.compile(r"[^A-Za-z ,.;:'\"()-]")
_CODE = re.compile(r"^\s*(>>>|\.\.\.|\.\. |[-=~^*+|]{3,}|[@$%#])", re.MULTILINE)
_SENTENCE = re.compile(r"[a-z)'\"`][.:!?][)'\"`]*$")


def docstring_files() -> Iterator[tuple[Path, str, str]]:
    """Every file as folder, path below it and name of the library, always in the same order."""
    for library, home in libraries():
        names = [
            path.relative_to(home)
            for path in home.rglob("*.py")
            if not LEFT_OUT.intersection(path.relative_to(home).parts)
        ]
        for name in sorted(names):
            yield home, name.as_posix(), library


def libraries() -> Iterator[tuple[str, Path]]:
    """Where each library lies; looking for a package does not import it."""
    yield "stdlib", Path(sysconfig.get_paths()["stdlib"])
    for package in PACKAGES:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise DataError(
                f"the docstrings of {package} are part of the corpus {DOCSTRINGS!r}, and it is not "
                "installed: install speedrun with its requirements"
            )
        yield package, Path(spec.submodule_search_locations[0])


def read_docstrings(path: Path, seen: set[bytes]) -> Iterator[Document]:
    """The documents of one file; `seen` knows the paragraphs of the files before it."""
    size = path.stat().st_size
    for paragraphs in _paragraphs(path):
        new = []
        for paragraph in paragraphs:
            known = hashlib.blake2b(paragraph.encode(), digest_size=16).digest()
            if known not in seen:
                seen.add(known)
                new.append(paragraph)
        text = "\n\n".join(new)
        if len(text) >= LEAST_BYTES:
            yield Document(text + "\n", size)


@functools.cache  # a corpus is streamed three times, and parsing takes all of the time: some 15 MB
def _paragraphs(path: Path) -> tuple[tuple[str, ...], ...]:
    """Paragraphs of prose by docstring."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about other people's escapes
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):  # templates, and files for other Pythons
        return ()
    found = (tuple(prose_of(text)) for text in _docstrings(tree))
    return tuple(paragraphs for paragraphs in found if paragraphs)


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Of a module and what is declared in it, from top to bottom."""
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node, clean=False)
        if text:
            yield text
    for part in (*body, *getattr(node, "orelse", ()), *getattr(node, "handlers", ())):
        yield from _docstrings(part)


def prose_of(docstring: str) -> Iterator[str]:
    """Its paragraphs that are sentences, each on one line."""
    for block in re.split(r"\n\s*\n", cleandoc(docstring)):
        if _CODE.search(block):
            continue
        text = " ".join(block.split())
        plain = 1 - len(_NOT_PLAIN.findall(text)) / max(1, len(text))
        prose = plain >= PLAIN and len(_WORD.findall(text)) >= LEAST_WORDS
        if prose and _SENTENCE.search(text) and _is_text(text):
            yield text


def _is_text(text: str) -> bool:
    """Escapes in source may stand for zeros and for halves of surrogate pairs."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False
