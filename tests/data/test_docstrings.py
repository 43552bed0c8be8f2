"""Prose out of docstrings: sentences kept, the rest left out, nothing imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from speedrun.data import docstrings
from speedrun.data.corpus import open_corpus
from speedrun.data.docstrings import docstring_files, prose_of, read_docstrings
from speedrun.errors import DataError

MODULE = '''"""This module stands here so that somebody can read its first sentence."""
import nowhere.to_be_found

class Thing:
    """A thing has a docstring of its own, which is long enough to be kept as a document here.

    >>> Thing().do()
    42

    Parameters
    ----------
    x : int
    """

    if True:
        async def do(self):
            """This module stands here so that somebody can read its first sentence.

            A sentence that was said before is left out, and a new one like this one is kept alone.
            """

    def short(self):
        """Too short."""
'''


def test_documents_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docstrings, "LEAST_BYTES", 80)
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    seen: set[bytes] = set()
    texts = [document.text for document in read_docstrings(path, seen)]
    assert [text.split()[:2] for text in texts] == [["A", "thing"], ["A", "sentence"]]
    assert len(seen) == 3


def test_what_is_no_sentence_is_left_out() -> None:
    kept = "Words that make a whole sentence are kept, on one line, with (some) marks."
    text = f"""{kept[:32]}
        {kept[33:]}

        >>> words = that + make + a + whole + sentence + are + kept
        A line of output that would otherwise look like a sentence of words.

        Parameters
        ----------
        the words that follow look like a sentence of the usual length.

        x = y[i] + 3 * z[j] - sum(w[k] for k in range(10)) / {{1: 2}} and so on it goes here.

        a heading of more than eight words that does not end like one does

        Short enough.
        """
    assert list(prose_of(text)) == [kept]
    assert list(prose_of("")) == []


def test_the_corpus_is_megabytes_of_prose_and_imports_nothing() -> None:
    script = """
import sys
from speedrun.data.corpus import open_corpus
before = set(sys.modules)
corpus = open_corpus(["docstrings"])
texts = [document.text for document in corpus.documents()]
assert texts == [document.text for document in corpus.documents()]
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not new & {"torch", "scipy", "sympy", "networkx", "mpmath"}, new
assert len(set(texts)) == len(texts)
letters = sum(c.isalpha() or c == " " for text in texts for c in text)
size = sum(map(len, texts))
assert letters / size > 0.9, letters / size
print(len(texts), size)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    documents, size = map(int, done.stdout.split())
    assert documents > 5_000
    assert size > 4_000_000


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docstrings, "PACKAGES", ("numpy", "no_such_package"))
    with pytest.raises(DataError, match="docstrings of no_such_package are part of the corpus"):
        open_corpus(["docstrings"])
    monkeypatch.setattr(docstrings, "PACKAGES", ("numpy",))
    names = [f"{library}/{below}" for _, below, library in docstring_files()]
    assert "stdlib/json/decoder.py" in names
    assert "numpy/__init__.py" in names
    assert not [name for name in names if "/tests/" in name or "site-packages" in name]
