"""Corpora: every source streams in a fixed order, and every bad input is named to the byte."""

import gzip
import json
import os
import random
import re
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from speedrun.data.corpus import (
    BLANK,
    CUT,
    NOT_UTF8,
    OTHER_FILES,
    Corpus,
    is_validation,
    open_corpus,
    validation_threshold,
)
from speedrun.data.readers import read_text
from speedrun.errors import ConfigError, DataError


def texts(*sources: Path | str, **options: object) -> list[str]:
    corpus = open_corpus([str(source) for source in sources], **options)  # type: ignore[arg-type]
    first = [document.text for document in corpus.documents()]
    assert [document.text for document in corpus.documents()] == first, "not the same twice"
    return first


def lines(records: list[object]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def compressed(data: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(data)
    return zstandard.ZstdCompressor(write_checksum=True).compress(data) if suffix else data


def write_parquet(path: Path, columns: dict[str, object], **options: object) -> None:
    pq.write_table(pa.table(columns), path, **options)


STORIES = [f"Story {number}: {random.Random(number).random()} é\n" for number in range(2000)]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_jsonl_plain_and_compressed(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"stories.jsonl{suffix}"
    records: list[object] = [{"id": 1, "story": story} for story in STORIES]
    path.write_bytes(compressed(lines(records), suffix) + compressed(b"\n \n", suffix))
    assert texts(path, text_field="story") == STORIES


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_text_plain_and_compressed(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"book.txt{suffix}"
    path.write_bytes(compressed("".join(STORIES).encode(), suffix))
    parts = texts(path, max_document_bytes=5000)
    assert "".join(parts) == "".join(STORIES)
    assert len(parts) > 10
    assert all(len(part.encode()) <= 5000 and part.endswith("\n") for part in parts)
    assert texts(path, max_document_bytes=10**7) == ["".join(STORIES)]


def test_parquet_of_several_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "stories.parquet"
    write_parquet(path, {"id": list(range(2000)), "text": STORIES}, row_group_size=300)
    assert texts(path) == STORIES
    large = tmp_path / "large.parquet"
    write_parquet(large, {"text": pa.array(STORIES, pa.large_string())})
    dictionary = tmp_path / "dictionary.parquet"
    write_parquet(dictionary, {"text": pa.array(STORIES).dictionary_encode()})
    assert texts(large) == texts(dictionary) == STORIES


@settings(max_examples=80, deadline=None)
@given(
    text=st.text(st.sampled_from("ab\n\u00e9\u65e5\U0001f600"), min_size=1, max_size=200),
    limit=st.integers(4, 40),
)
def test_cutting_loses_nothing(
    tmp_path_factory: pytest.TempPathFactory, text: str, limit: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_bytes(text.encode())
    pieces = list(read_text(path, None, limit))
    assert "".join(piece.text for piece in pieces) == text
    assert all(0 < len(piece.text.encode()) <= limit for piece in pieces)
    assert pieces[-1].read == len(text.encode())
    for piece in pieces[:-1]:
        assert piece.text.endswith("\n") or "\n" not in piece.text


def test_folders_and_globs_are_sorted_and_hidden_files_left_out(tmp_path: Path) -> None:
    for name in (
        "b.txt",
        "a/z.md",
        "a/b.py",
        ".git/c.txt",
        ".hidden.txt",
        "picture.png",
        "a/e.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "a/e.txt" else name)
    (tmp_path / "a/more.jsonl").write_bytes(lines([{"text": "one"}, {"text": " "}]))
    assert texts(tmp_path) == ["a/b.py", "one", "a/z.md", "b.txt"]
    assert texts(tmp_path / "**/*.md", tmp_path / "b.txt") == ["a/z.md", "b.txt"]
    notes: Counter[str] = Counter()
    corpus = open_corpus([str(tmp_path)], max_document_bytes=1024)
    documents = list(corpus.documents(notes))
    assert +notes == {OTHER_FILES: 1, BLANK: 2}
    assert documents[1].name == f"{tmp_path.name}/a/more.jsonl line 1"
    assert corpus.names == (tmp_path.name,)
    assert corpus.total_bytes == documents[-1].read


def test_notes_count_cut_files(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("0123456789\n" * 1000)
    (tmp_path / "short.txt").write_text("short")
    notes: Counter[str] = Counter()
    list(open_corpus([str(tmp_path)], max_document_bytes=2000).documents(notes))
    assert +notes == {CUT: 1}


def test_standard_library() -> None:
    corpus = open_corpus(["stdlib"])
    notes: Counter[str] = Counter()
    names, size = [], 0
    for document in corpus.documents(notes):
        names.append(document.name)
        size += len(document.text.encode())
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


def test_validation_is_by_content_and_never_empty() -> None:
    hashes = [random.Random(number).randbytes(32) for number in range(1000)]
    threshold = validation_threshold(0.1, min(hashes), max(hashes))
    chosen = [text_hash for text_hash in hashes if is_validation(text_hash, threshold)]
    assert 70 < len(chosen) < 130
    fewer = validation_threshold(0.1, min(hashes[:500]), max(hashes[:500]))
    assert fewer == threshold, "the bound moves with the corpus"
    pair = sorted(hashes[:2])
    for fraction in (1e-9, 1 - 1e-9):
        bound = validation_threshold(fraction, *pair)
        assert [is_validation(text_hash, bound) for text_hash in pair] == [True, False]
    with pytest.raises(DataError, match="one single document"):
        validation_threshold(0.5, hashes[0], hashes[0])


TEXT = "".join(STORIES).encode()
GOOD_LINES = lines([{"text": story} for story in STORIES[:3]])
BAD_FILES: list[tuple[str, bytes, str]] = [
    ("empty.txt", b"", r"empty\.txt is empty"),
    ("blank.txt", b" \n\t\n", "no document of blank.txt has any text"),
    ("blank.jsonl", b"\n\n", "no document of blank.jsonl has any text"),
    ("blank.jsonl.gz", compressed(b"", ".gz"), "no document"),
    ("latin.txt", TEXT + b"caf\xe9 au lait", rf"not UTF-8 at byte {len(TEXT) + 3} \(value 0xe9\)"),
    ("binary.txt", TEXT + b"\x00\x01", rf"is binary: byte {len(TEXT)} is zero"),
    ("wide.txt", "text".encode("utf-16-le"), "is binary: byte 1 is zero"),
    ("end.txt", TEXT + "é".encode()[:1], rf"not UTF-8 at byte {len(TEXT)} "),
    ("notjson.jsonl", GOOD_LINES + b"{oops\n", "line 4 is not JSON .* column 2"),
    ("cut.jsonl", GOOD_LINES[:-9], "line 3 is not JSON"),
    ("list.jsonl", b"[1]\n", "line 1 is a JSON list"),
    (
        "field.jsonl",
        GOOD_LINES + b'{"body": 1, "id": 2}\n',
        "line 4 has no field 'text', only 'body', 'id'",
    ),
    ("none.jsonl", b"{}\n", "only none at all"),
    ("number.jsonl", b'{"text": 5}\n', "line 1 has int under 'text'"),
    ("null.jsonl", b'{"text": null}\n', "line 1 has NoneType under 'text'"),
    (
        "surrogate.jsonl",
        b'{"text": "a\\ud800"}\n',
        "line 1 has half of a surrogate pair at character 1",
    ),
    ("deep.jsonl", b"[" * 100_000 + b"\n", "nested too deeply"),
    (
        "latin.jsonl",
        GOOD_LINES + b'{"text": "\xe9"}\n',
        f"not UTF-8 at byte {len(GOOD_LINES) + 10}",
    ),
    ("binary.jsonl", GOOD_LINES + b"\x00\n", f"is binary: byte {len(GOOD_LINES)} is zero"),
    ("plain.jsonl.gz", GOOD_LINES, "cut short or not gzip"),
    ("plain.jsonl.zst", GOOD_LINES, "cut short or not zstd"),
    ("text.parquet", TEXT, "cut short or not a parquet file"),
    ("empty.parquet", b"PAR1", "cut short or not a parquet file"),
    ("file.xyz", TEXT, "does not say how to read it"),
    ("file.parquet.gz", TEXT, "does not say how to read it"),
]


@pytest.mark.parametrize(("name", "data", "message"), BAD_FILES, ids=[bad[0] for bad in BAD_FILES])
def test_bad_files_are_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        texts(tmp_path / name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".txt.zst", ".parquet"])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"stories{suffix}"
    if suffix == ".parquet":
        write_parquet(path, {"text": STORIES}, row_group_size=500)
        data = path.read_bytes()
    else:
        content = TEXT if ".txt" in suffix else lines([{"text": story} for story in STORIES])
        data = compressed(content, path.suffix)
    for length in (1, 7, 100, len(data) // 2, len(data) - 5, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(DataError, match="cut short or not"):
            texts(path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_flipped_bytes_in_compressed_files_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"stories.jsonl{suffix}"
    data = compressed(lines([{"text": story} for story in STORIES]), suffix)
    for offset in range(12, len(data), len(data) // 15):
        damaged = bytearray(data)
        damaged[offset] ^= 0x55
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=re.escape(path.name)):
            texts(path)


def test_flipped_bytes_in_parquet_are_refused_when_it_has_checksums(tmp_path: Path) -> None:
    path = tmp_path / "stories.parquet"
    write_parquet(path, {"text": STORIES}, write_page_checksum=True, use_dictionary=False)
    data = path.read_bytes()
    for offset in range(200, len(data) // 2, len(data) // 20):
        damaged = bytearray(data)
        damaged[offset] ^= 0x55
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"stories\.parquet is cut short or not"):
            texts(path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a"], "id": [1]}, "has no column 'text', only 'body', 'id'"),
        ({"text": [1, 2]}, "has int64 in column 'text'"),
        ({"text": ["a", None]}, "row 2 has NoneType under 'text'"),
        (
            {"text": pa.array([b"fine", b"caf\xe9"]).view(pa.string())},
            r"row 2 is not UTF-8 \(byte 3 of its text\)",
        ),
    ],
)
def test_bad_parquet_columns(tmp_path: Path, columns: dict[str, object], message: str) -> None:
    write_parquet(tmp_path / "a.parquet", columns)
    with pytest.raises(DataError, match=message):
        texts(tmp_path / "a.parquet")


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speedrun.data.readers.MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "' + b"x" * (2 << 20))
    with pytest.raises(DataError, match="line 1 is longer than 1 MiB"):
        texts(tmp_path / "a.jsonl")


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
