"""The shard format byte by byte."""

import hashlib
import struct
import tempfile
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speedrun.data import shards
from speedrun.data.dataset import Dataset
from speedrun.data.shards import (
    ShardWriter,
    read_header,
    read_tokens,
    write_shard,
)
from speedrun.errors import DataError, SpeedrunError
from speedrun.files import has_sha256


def public_file(path: Path, tokens: list[int]) -> None:
    """A shard as other programs write it, from the description of the format alone."""
    header = [20240520, 1, len(tokens)] + [0] * 253
    path.write_bytes(struct.pack("<256i", *header) + struct.pack(f"<{len(tokens)}H", *tokens))


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


def test_the_first_tokens_can_be_had_alone(tmp_path: Path) -> None:
    public_file(tmp_path / "x.bin", list(range(100)))
    assert read_tokens(tmp_path / "x.bin", 10).tolist() == list(range(10))


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


def test_a_token_too_large_for_the_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="too large"):
        write_shard(tmp_path / "x.bin", np.array([1, 70_000]))


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.bin").mkdir()  # cannot be replaced by a file
    with pytest.raises(SpeedrunError, match=r"cannot write .*x.bin"):
        write_shard(tmp_path / "x.bin", np.arange(5))
    with pytest.raises(SpeedrunError, match=r"cannot write .*No such file"):
        write_shard(tmp_path / "missing" / "x.bin", np.arange(5))
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


@settings(deadline=None, max_examples=25)  # every shard is synced to disk
@given(st.lists(st.integers(0, 25), max_size=12), st.integers(3, 20))
def test_the_writer_cuts_the_stream_at_shard_ends(lengths: list[int], shard_tokens: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = ShardWriter(folder, "train", shard_tokens=shard_tokens)
        stream: list[int] = []
        for length in lengths:
            document = list(range(1000, 1000 + length))
            writer.add(np.array(document, dtype=np.uint16))
            stream += document
            assert writer.pending == len(stream) % shard_tokens
        found = writer.finish()
        assert [s.file for s in found] == [f"speedrun_train_{i:06d}.bin" for i in range(len(found))]
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


@pytest.mark.parametrize(("shard_tokens", "count"), [(500_000, 16), (100_000_000, 1)])
def test_the_writer_needs_memory_for_a_block_only(
    tmp_path: Path, shard_tokens: int, count: int
) -> None:
    document = np.zeros(50_000, dtype=np.uint16)
    tracemalloc.start()
    try:
        writer = ShardWriter(tmp_path, "train", shard_tokens=shard_tokens)
        for _ in range(160):  # 16 MB, in shards of 1 MB or as a part of one of 200 MB
            writer.add(document)
        found = writer.finish()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found) == count
    assert peak < 2_500_000


def test_a_shard_has_no_name_before_it_is_whole(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", shard_tokens=1_000_000)
    writer.add(np.zeros(1_600_000, dtype=np.uint16))
    names = ["speedrun_train_000000.bin", "speedrun_train_000001.bin.tmp"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (writer.pending, writer.room) == (600_000, 400_000)
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == names[:1]
    assert has_sha256(tmp_path / names[0], writer.shards[0].sha256)


def test_chunk_checksums_cover_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", 1000)
    writer = ShardWriter(tmp_path, "train")
    writer.add(np.arange(800))
    (shard,) = writer.finish()
    data = (tmp_path / shard.file).read_bytes()
    pieces = [data[:1000], data[1000:2000], data[2000:]]
    assert shard.chunks == tuple(f"{zlib.crc32(piece):08x}" for piece in pieces)
