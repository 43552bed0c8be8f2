"""Corpora: every source streams in a fixed order, and what is missing is named."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from speedrun.data.corpus import (
    BLANK,
    CUT,
    NOT_UTF8,
    OTHER_FILES,
    Corpus,
    SourceFile,
    open_corpus,
)
from speedrun.errors import ConfigError, DataError
from tests.data.test_readers import STORIES, compressed, lines, texts


def test_folders_and_globs_are_sorted_and_hidden_files_left_out(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/b.py", ".git/c.txt", ".hidden.txt", "picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a/e.txt").write_text("")
    (tmp_path / "a/more.jsonl").write_bytes(lines([{"text": "one"}, {"text": " "}]))
    assert texts(tmp_path) == ["a/b.py", "one", "a/z.md", "b.txt"]
    assert texts(tmp_path / "**/*.md", tmp_path / "b.txt") == ["a/z.md", "b.txt"]
    notes: Counter[str] = Counter()
    corpus = open_corpus([str(tmp_path)], max_document_bytes=1024)
    documents = list(corpus.documents(notes))
    assert +notes == {OTHER_FILES: 1, BLANK: 2}
    assert corpus.names == (tmp_path.name,)
    assert corpus.total_bytes == documents[-1].read


@pytest.mark.parametrize("name", ["wiki.train.tokens", "wiki.train.raw", "notes.TXT", "a.md.gz"])
def test_endings_that_mean_text(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(compressed(b"a text", ".gz" if name.endswith("gz") else ""))
    assert texts(tmp_path / name) == ["a text"]


def test_files_of_a_folder_share_all_but_a_name(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("x")
    files = [
        source for source in open_corpus([str(tmp_path)]).sources if isinstance(source, SourceFile)
    ]
    assert [file.path for file in files] == [tmp_path / f"{number}.txt" for number in range(3)]
    assert [file.name for file in files] == [f"{tmp_path.name}/{number}.txt" for number in range(3)]
    assert len({id(file.home) for file in files}) == len({id(file.source) for file in files}) == 1
    assert not any(hasattr(file, "__dict__") for file in files)


def test_notes_count_cut_files(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("0123456789\n" * 1000)
    (tmp_path / "short.txt").write_text("short")
    notes: Counter[str] = Counter()
    list(open_corpus([str(tmp_path)], max_document_bytes=2000).documents(notes))
    assert +notes == {CUT: 1}


def test_standard_library() -> None:
    corpus = open_corpus(["stdlib"])
    notes: Counter[str] = Counter()
    size = sum(len(document.text.encode()) for document in corpus.documents(notes))
    names = [source.name for source in corpus.sources]
    assert names == sorted(names)
    assert "stdlib/json/decoder.py" in names
    assert not [
        name for name in names if re.search("site-packages|__pycache__|_sysconfigdata", name)
    ]
    assert 8e6 < size < 100e6
    assert set(notes) <= {BLANK, NOT_UTF8, CUT}
    assert notes[CUT] == 0
    assert notes[NOT_UTF8] < 20


def test_stamps_follow_files_and_content_hashes_follow_content(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")

    def both() -> tuple[str, str]:
        corpus: Corpus = open_corpus([str(path)])
        return corpus.stamp(), corpus.content_hash()

    first = both()
    assert both() == first
    os.utime(path, ns=(0, 0))  # a touch may fall into the same tick of the clock
    touched = both()
    assert touched[0] != first[0]
    assert touched[1] == first[1]
    path.write_text("two")
    assert both()[1] != first[1]


def test_hub_datasets_stream_through_the_datasets_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set/train.jsonl").write_bytes(lines([{"text": story} for story in STORIES[:5]]))
    assert texts(f"hf:{tmp_path}/set:train") == STORIES[:5]
    with pytest.raises(DataError, match="row 1 has no field 'body', only 'text'"):
        texts(f"hf:{tmp_path}/set", text_field="body")
    with pytest.raises(DataError, match="cannot be read after row 0"):
        texts(f"hf:{tmp_path}/set:test")
    with pytest.raises(ConfigError, match="is not hf:NAME"):
        texts("hf:a:b:c")


def test_hub_datasets_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'speedrun\[hub\]'"):
        texts("hf:some/name")


def test_missing_sources_suggest_near_names(tmp_path: Path) -> None:
    (tmp_path / "stories.txt").write_text("x")
    with pytest.raises(DataError, match=r"did you mean .*stories\.txt\?"):
        texts(tmp_path / "storys.txt")
    with pytest.raises(DataError, match=r"did you mean stdlib\?"):
        texts("stdlb")
    with pytest.raises(DataError, match="no file matches"):
        texts(tmp_path / "*.md")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="holds no file this can read"):
        texts(tmp_path / "none")
    with pytest.raises(DataError, match="reached by two sources"):
        texts(tmp_path / "stories.txt", tmp_path)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="no source is given"):
        texts()
    with pytest.raises(ConfigError, match="use at least 1024"):
        texts("stdlib", max_document_bytes=10)
