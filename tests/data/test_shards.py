"""The shard format byte by byte, the manifest, and what opening a dataset accepts."""

import hashlib
import json
import os
import struct
import tempfile
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speedrun.data import shards
from speedrun.data.shards import (
    Dataset,
    Manifest,
    ShardWriter,
    SplitInfo,
    check_vocab_size,
    read_header,
    read_tokens,
    write_shard,
)
from speedrun.data.tokenizer import GPT2_FINGERPRINT
from speedrun.errors import DataError


def public_file(path: Path, tokens: list[int]) -> None:
    """A shard as other programs write it, from the description of the format alone."""
    header = [20240520, 1, len(tokens)] + [0] * 253
    path.write_bytes(struct.pack("<256i", *header) + struct.pack(f"<{len(tokens)}H", *tokens))


def make_dataset(folder: Path, **changes: Any) -> Manifest:
    splits = {}
    for name, documents in (("train", 5), ("val", 2)):
        writer = ShardWriter(folder, name, shard_tokens=30)
        for document in range(documents):
            writer.add(np.array([9, *range(document + 7)], dtype=np.uint16) % 10)
        found = writer.finish()
        splits[name] = SplitInfo(sum(s.tokens for s in found), documents, 60, tuple(found))
    fields: dict[str, Any] = {
        "tokenizer": "byte",
        "tokenizer_fingerprint": "f" * 64,
        "vocab_size": 10,
        "eot": 9,
        "sources": ("notes",),
        "source_fingerprint": "5" * 64,
        "splits": splits,
    }
    manifest = Manifest(**{**fields, **changes})
    manifest.save(folder)
    return manifest


def test_a_public_shard_is_read_and_written_unchanged(tmp_path: Path) -> None:
    tokens = [50256, 0, 1, 65_534, 464, 3290, 50256, 7]
    public, ours = tmp_path / "public.bin", tmp_path / "ours.bin"
    public_file(public, tokens)
    assert read_header(public) == 8
    assert read_tokens(public).tolist() == tokens
    digest = write_shard(ours, np.array(tokens))
    assert ours.read_bytes() == public.read_bytes()
    assert digest == hashlib.sha256(public.read_bytes()).hexdigest()
    assert sorted(tmp_path.iterdir()) == [ours, public]


def test_the_first_tokens_go_into_given_memory(tmp_path: Path) -> None:
    public_file(tmp_path / "x.bin", list(range(100)))
    memory = np.full(12, 999, dtype=np.uint16)
    assert read_tokens(tmp_path / "x.bin", memory[1:11]).base is memory
    assert memory.tolist() == [999, *range(10), 999]


HEADER = struct.pack("<256i", 20240520, 1, 5, *[0] * 253)
DAMAGE = {
    "empty": (b"", r"ends at byte 0, inside the 1024-byte header"),
    "half a header": (HEADER[:500], r"ends at byte 500"),
    "text": (
        b"Once upon a time. " * 100,
        r"magic number at byte 0 is 1701015119, expected 20240520",
    ),
    "version": (struct.pack("<256i", 20240520, 2, 5, *[0] * 253), r"version at byte 4 is 2"),
    "no tokens": (struct.pack("<256i", 20240520, 1, 0, *[0] * 253), r"count at byte 8 is 0"),
    "negative": (struct.pack("<256i", 20240520, 1, -3, *[0] * 253), r"count at byte 8 is -3"),
    "cut": (HEADER + bytes(7), r"truncated at byte 1031, .* promises 5 tokens, 1034 bytes"),
    "longer": (HEADER + bytes(12), r"runs on to byte 1036, .* promises 5 tokens, 1034 bytes"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_named_with_the_offset(tmp_path: Path, kind: str) -> None:
    data, sentence = DAMAGE[kind]
    path = tmp_path / "x_train_000000.bin"
    path.write_bytes(data)
    for act in (read_header, read_tokens, lambda path: Dataset.open(path.parent)):
        with pytest.raises(DataError, match=rf"x_train_000000.bin .*{sentence}") as caught:
            act(path)
        assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for act in (read_header, read_tokens):
        with pytest.raises(DataError, match=r"none.bin: No such file"):
            act(tmp_path / "none.bin")


def test_a_token_past_the_vocabulary_is_named_with_the_offset(tmp_path: Path) -> None:
    public_file(tmp_path / "x.bin", [1, 2, 50_257, 60_000])
    assert len(read_tokens(tmp_path / "x.bin", vocab_size=60_001)) == 4
    with pytest.raises(DataError, match=r"x.bin holds token 50257 at byte 1028, .* of 50257"):
        read_tokens(tmp_path / "x.bin", vocab_size=50_257)


def test_a_vocabulary_too_large_for_the_format_is_refused(tmp_path: Path) -> None:
    check_vocab_size(65_535)
    with pytest.raises(DataError, match=r"vocabulary of 65536 .* 65535"):
        check_vocab_size(65_536)
    with pytest.raises(DataError, match="vocabulary of 100000"):
        make_dataset(tmp_path, vocab_size=100_000)
    assert not (tmp_path / "manifest.json").exists()
    with pytest.raises(AssertionError, match="too large"):
        write_shard(tmp_path / "x.bin", np.array([1, 70_000]))


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.bin").mkdir()  # cannot be replaced by a file
    with pytest.raises(DataError, match=r"cannot write .*x.bin"):
        write_shard(tmp_path / "x.bin", np.arange(5))
    with pytest.raises(DataError, match=r"cannot write .*No such file"):
        write_shard(tmp_path / "missing" / "x.bin", np.arange(5))
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


@settings(deadline=None, max_examples=25)  # every shard is synced to disk
@given(st.lists(st.integers(0, 25), max_size=12), st.integers(3, 20))
def test_the_writer_cuts_the_stream_at_shard_ends(lengths: list[int], shard_tokens: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = ShardWriter(folder, "train", prefix="corpus", shard_tokens=shard_tokens)
        stream: list[int] = []
        for length in lengths:
            document = list(range(1000, 1000 + length))
            writer.add(np.array(document, dtype=np.uint16))
            stream += document
            assert writer.pending == len(stream) % shard_tokens
        found = writer.finish()
        assert [s.file for s in found] == [f"corpus_train_{i:06d}.bin" for i in range(len(found))]
        parts = [read_tokens(folder / shard.file).tolist() for shard in found]
        assert parts == [
            stream[first : first + shard_tokens] for first in range(0, len(stream), shard_tokens)
        ]
        for shard, part in zip(found, parts, strict=True):
            data = (folder / shard.file).read_bytes()
            assert shard.tokens == len(part)
            assert shard.sha256 == hashlib.sha256(data).hexdigest()
            assert shard.chunks == (f"{zlib.crc32(data):08x}",)


def test_a_stopped_writer_goes_on_where_its_shards_end(tmp_path: Path) -> None:
    stream = np.arange(100, dtype=np.uint16)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for folder in (whole, resumed):
        folder.mkdir()
    writer = ShardWriter(whole, "train", shard_tokens=30)
    writer.add(stream)
    expected = writer.finish()
    stopped = ShardWriter(resumed, "train", shard_tokens=30)
    stopped.add(stream[:70])
    kept = 70 - stopped.pending
    assert kept == 60
    again = ShardWriter(resumed, "train", shard_tokens=30, finished=stopped.shards)
    again.add(stream[kept:])
    assert again.finish() == expected
    for path in whole.iterdir():
        assert (resumed / path.name).read_bytes() == path.read_bytes()


def test_the_writer_needs_memory_for_one_shard_only(tmp_path: Path) -> None:
    document = np.zeros(50_000, dtype=np.uint16)
    tracemalloc.start()
    try:
        writer = ShardWriter(tmp_path, "train")  # 200 MB when full
        writer.add(document)
        small = tracemalloc.get_traced_memory()[1]
        writer = ShardWriter(tmp_path, "train", shard_tokens=500_000)
        tracemalloc.reset_peak()
        for _ in range(80):  # eight shards of 1 MB
            writer.add(document)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(writer.finish()) == 8
    assert small < 1_000_000
    assert peak < 2_500_000


def test_chunk_checksums_cover_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", 1000)
    writer = ShardWriter(tmp_path, "train")
    writer.add(np.arange(800))
    (shard,) = writer.finish()
    data = (tmp_path / shard.file).read_bytes()
    pieces = [data[:1000], data[1000:2000], data[2000:]]
    assert shard.chunks == tuple(f"{zlib.crc32(piece):08x}" for piece in pieces)


def test_a_dataset_and_its_manifest_come_back(tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path)
    assert Manifest.load(tmp_path) == manifest
    dataset = Dataset.open(str(tmp_path))
    assert dataset.manifest == manifest
    assert (dataset.vocab_size, dataset.eot, dataset.tokenizer_spec) == (10, 9, "byte")
    assert dataset.tokenizer_fingerprint == "f" * 64
    train = dataset.split("train")
    assert (train.tokens, train.documents, train.bytes) == (50, 5, 60)
    assert train.counts == (30, 20)
    assert train.head(35, 10)[:10].tolist() == [9, 0, 1, 2, 3, 4, 5, 6, 9, 0]
    whole = np.concatenate([read_tokens(path) for path in train.paths])
    assert train.head(50, 10).tolist() == whole.tolist()
    with pytest.raises(DataError, match="no split test, only train, val"):
        dataset.split("test")
    assert os.fspath(tmp_path) not in (tmp_path / "manifest.json").read_text()


def test_the_fingerprint_names_the_tokens_and_nothing_else(tmp_path: Path) -> None:
    def fingerprint(name: str, **changes: Any) -> str:
        (tmp_path / name).mkdir()
        make_dataset(tmp_path / name, **changes)
        return Dataset.open(tmp_path / name).fingerprint

    first = fingerprint("a")
    assert fingerprint("b", sources=("elsewhere",), source_fingerprint="6" * 64) == first
    assert fingerprint("c", tokenizer_fingerprint="e" * 64) != first
    assert fingerprint("d", eot=8) != first
    path = tmp_path / "a" / "manifest.json"
    digest = Manifest.load(path.parent).splits["val"].shards[0].sha256
    path.write_text(path.read_text().replace(digest, "0" * 64))
    assert Dataset.open(path.parent).fingerprint != first


def test_a_folder_of_public_shards_is_a_dataset(tmp_path: Path) -> None:
    for index in (2, 10, 1):
        public_file(tmp_path / f"fineweb_train_{index:06d}.bin", [50256] * index)
    public_file(tmp_path / "fineweb_val_000000.bin", [50256, 1, 2])
    (tmp_path / "fineweb_train_000011.bin.tmp").write_bytes(b"half")
    dataset = Dataset.open(tmp_path)
    assert dataset.split("train").counts == (1, 2, 10)
    assert dataset.split("val").documents is None
    assert (dataset.vocab_size, dataset.eot) == (50_257, 50_256)
    assert dataset.manifest is None
    assert dataset.tokenizer_fingerprint == GPT2_FINGERPRINT
    before = dataset.fingerprint
    public_file(tmp_path / "fineweb_val_000000.bin", [50256, 1, 3])
    assert Dataset.open(tmp_path).fingerprint != before


def test_a_folder_that_is_no_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no dataset folder .*none"):
        Dataset.open(tmp_path / "none")
    with pytest.raises(DataError, match=r"neither manifest.json nor shards"):
        Dataset.open(tmp_path)
    unfinished = tmp_path / "mine.partial"
    unfinished.mkdir()
    write_shard(unfinished / "x_train_000000.bin", np.arange(5))
    with pytest.raises(DataError, match="did not finish"):
        Dataset.open(unfinished)
    (unfinished / "tokenizer").mkdir()
    with pytest.raises(DataError, match="did not finish"):
        Dataset.open(unfinished.rename(tmp_path / "mine"))


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    make_dataset(tmp_path)
    path = tmp_path / "manifest.json"
    whole = path.read_text()
    shard = json.loads(whole)["splits"]["val"]["shards"][0]
    outside = {"tokens": shard["tokens"], "documents": 1, "bytes": 1}
    outside["shards"] = [{**shard, "file": "../other.bin"}]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"format": 2}, "format 2"),
        ({"eot": 10}, "eot 10"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"colour": "red"}, "colour"),
        ({"splits": {"train": {"tokens": 1}}}, "documents"),
        ({"splits": {"train": {**outside, "tokens": 3}}}, "claims 3 tokens"),
        ({"splits": {"train": outside}}, r"'../other.bin' is not a plain"),
    ]
    for changes, sentence in cases:
        path.write_text(whole)
        edit(tmp_path, **changes)
        with pytest.raises(DataError, match=rf"manifest.json is damaged: .*{sentence}"):
            Dataset.open(tmp_path)
    for text in ("", whole[:200], "[]", whole.replace('"eot"', '"eof"'), "\0\0"):
        path.write_text(text)
        with pytest.raises(DataError, match=r"manifest.json is damaged") as caught:
            Dataset.open(tmp_path)
        assert "\n" not in str(caught.value)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"manifest.json is damaged"):
        Dataset.open(tmp_path)


def test_shards_that_contradict_the_manifest_are_refused(tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path)
    path = tmp_path / manifest.splits["train"].shards[1].file
    write_shard(path, np.arange(3))
    with pytest.raises(DataError, match=r"_000001.bin holds 3 tokens .* lists 20"):
        Dataset.open(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"_000001.bin: No such file"):
        Dataset.open(tmp_path)
