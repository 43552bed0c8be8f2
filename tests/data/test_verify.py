"""Damage of every kind is found and placed."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from speedrun.data import verify
from speedrun.data.shards import write_shard
from speedrun.data.verify import Report
from speedrun.errors import DataError
from tests.data.conftest import CHUNK
from tests.data.test_dataset import edit


def shard(folder: Path, index: int = 0, split: str = "train") -> Path:
    return folder / f"speedrun_{split}_{index:06d}.bin"


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def problems(folder: Path) -> tuple[str, ...]:
    report = verify.verify(folder)
    assert all("\n" not in problem for problem in report.problems)
    return report.problems


def test_a_sound_dataset_passes(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = verify.verify(folder, progress=lambda done, total: seen.append((done, total)))
    size = sum(path.stat().st_size for path in folder.glob("*.bin"))
    assert report == Report(3, size, ())
    assert seen[-1] == (size, size)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


@pytest.mark.parametrize("offset", [1030, 4095, 4096, 9001, 17_023])
def test_every_flipped_byte_is_placed_in_its_chunk(folder: Path, offset: int) -> None:
    path = shard(folder)
    original = path.read_bytes()
    overwrite(path, offset, bytes([original[offset] ^ 1]))
    found = problems(folder)
    first = offset // CHUNK * CHUNK
    last = min(first + CHUNK, len(original)) - 1
    assert f"{path} is damaged between bytes {first} and {last};" in found[0]
    # A flip in the upper byte of a token also makes it an id past the vocabulary.
    assert len(found) == 1 + offset % 2


def test_a_flip_in_the_unused_header_is_found(folder: Path) -> None:
    overwrite(shard(folder), 500, b"\1")
    (problem,) = problems(folder)
    assert "between bytes 0 and 4095" in problem


def test_every_damaged_file_is_named_once(folder: Path) -> None:
    overwrite(shard(folder, 0), 0, b"\0")
    shard(folder, 1).write_bytes(shard(folder, 1).read_bytes()[:-100])
    shard(folder, 0, "val").unlink()
    found = problems(folder)
    assert len(found) == 3
    assert "train_000000.bin is not a token shard: the magic number at byte 0" in found[0]
    assert "train_000001.bin is truncated at byte" in found[1]
    assert "val_000000.bin: No such file" in found[2]


def test_damage_in_several_chunks_is_one_sentence(folder: Path) -> None:
    for offset in (5000, 9000, 13_000):
        overwrite(shard(folder), offset, b"!")
    (problem,) = problems(folder)
    assert "between bytes 4096 and 8191 and in 2 later chunks" in problem


def test_a_token_past_the_vocabulary_is_placed_exactly(folder: Path) -> None:
    overwrite(shard(folder), 6000, struct.pack("<H", 257))
    found = problems(folder)
    assert "damaged between bytes 4096 and 8191" in found[0]
    assert f"{shard(folder)} holds token 257 at byte 6000, past the vocabulary of 257" in found[1]


def test_a_manifest_changed_afterwards_is_found(folder: Path) -> None:
    path = folder / "manifest.json"
    whole = path.read_text()
    splits = json.loads(whole)["splits"]

    splits["val"]["shards"][0]["sha256"] = "0" * 64
    edit(folder, splits=splits)
    (problem,) = problems(folder)
    assert "SHA-256" in problem

    path.write_text(whole)
    splits = json.loads(whole)["splits"]
    splits["train"]["documents"] = 6
    edit(folder, splits=splits)
    (problem,) = problems(folder)
    assert "holds 5 documents" in problem
    assert "lists 6" in problem

    path.write_text(whole)
    edit(folder, tokenizer_fingerprint="0" * 64)
    (problem,) = problems(folder)
    assert "tokenizer has fingerprint" in problem

    path.write_text(whole)
    edit(folder, eot=ord("x"))  # the ids are the same, but no document opens any more
    assert "opens with token 256 at byte 1024" in " ".join(problems(folder))


def test_a_missing_or_changed_tokenizer_is_found(folder: Path) -> None:
    for path in (folder / "tokenizer").iterdir():
        path.unlink()
    (problem,) = problems(folder)
    assert "tokenizer" in problem


def test_public_shards_are_checked_without_a_manifest(tmp_path: Path) -> None:
    # The public training files open in the middle of a document, which is no fault.
    write_shard(tmp_path / "fineweb_train_000001.bin", np.array([5, 6, 50256, 7]))
    assert problems(tmp_path) == ()
    write_shard(tmp_path / "fineweb_val_000000.bin", np.array([50256, 50257]))
    (problem,) = problems(tmp_path)
    assert "val_000000.bin holds token 50257 at byte 1026" in problem


def test_what_is_no_dataset_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither"):
        verify.verify(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        verify.verify(tmp_path)
