"""The manifest, and which folders are datasets."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speedrun.data.dataset import Dataset, Manifest, SplitInfo
from speedrun.data.gpt2 import GPT2_FINGERPRINT
from speedrun.data.shards import ShardWriter, read_tokens, write_shard
from speedrun.errors import DataError
from tests.data.test_shards import public_file


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


def test_a_dataset_and_its_manifest_come_back(tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path)
    assert Manifest.load(tmp_path) == manifest
    dataset = Dataset.open(tmp_path)
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
    unreadable = {**outside, "shards": [{**shard, "file": "a\0b.bin"}]}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"format": 2}, "format 2"),
        ({"eot": 10}, "eot 10"),
        ({"vocab_size": 65_536}, "vocab_size 65536"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"colour": "red"}, "colour"),
        ({"splits": {"train": {"tokens": 1}}}, "documents"),
        ({"splits": {"train": {**outside, "tokens": 3}}}, "claims 3 tokens"),
        ({"splits": {"train": outside}}, r"'../other.bin' is not a plain"),
        ({"splits": {"train": unreadable}}, r"'a\\x00b.bin' is not a plain"),
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
