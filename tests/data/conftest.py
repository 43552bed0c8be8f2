"""A dataset of a few short documents and a long one, in bytes."""

from pathlib import Path

import numpy as np
import pytest

from speedrun.data import shards, verify
from speedrun.data.dataset import Manifest, SplitInfo
from speedrun.data.shards import ShardWriter
from speedrun.data.tokenizer import ByteTokenizer

CHUNK = 4096
TEXTS = {"train": ["one fish", "two fish", "", "red " * 3000, "blue"], "val": ["old fish", "new"]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Bytes as tokens in shards of 8,000 tokens, checked in chunks of 4 KiB."""
    for module in (shards, verify):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    tokenizer = ByteTokenizer()
    splits = {}
    for name, texts in TEXTS.items():
        writer = ShardWriter(tmp_path, name, shard_tokens=8_000)
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            assert len(ids) == len(text)
            writer.add(np.array([tokenizer.eot], dtype=np.uint16))
            writer.add(ids)
        found = writer.finish()
        size = sum(map(len, texts))
        splits[name] = SplitInfo(sum(s.tokens for s in found), len(texts), size, tuple(found))
    tokenizer.save(tmp_path / "tokenizer")
    Manifest(
        tokenizer="byte",
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eot=tokenizer.eot,
        sources=("fish",),
        source_fingerprint="0" * 64,
        splits=splits,
    ).save(tmp_path)
    return tmp_path
