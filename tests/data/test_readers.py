"""Files of every kind are read exactly, and every bad one is named to the byte."""

import gzip
import json
import random
import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from speedrun.data.corpus import open_corpus
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
    ("digits.jsonl", b'{"text": ' + b"9" * 5000 + b"}\n", "line 1 has a number that is too long"),
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


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.zst", "a.parquet"])
def test_a_missing_extra_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"the files extra: pip install 'speedrun\[files\]'"):
        texts(tmp_path / name)
