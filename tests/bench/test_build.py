"""The bench of builds: rivals that do the same work, and memory that is the build's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speedrun.bench.build import (
    build_with,
    check_same_ids,
    measure_build,
    size_name,
    standard_library,
    texts,
    write_lines,
)
from speedrun.data.build import build_dataset
from speedrun.data.corpus import open_corpus
from speedrun.data.dataset import Dataset
from speedrun.data.tokenizer import BPE_FILE, BpeTokenizer, ByteTokenizer, train_bpe
from speedrun.limits import cores
from tests.bench.test_benches import assert_figures

PIECES = [Path(json.__file__).with_name(name).read_text() for name in ("decoder.py", "encoder.py")]
BPE = train_bpe(PIECES, 300)


def test_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speedrun.bench.build.standard_library", lambda: PIECES)
    before = cores()
    figures = measure_build(1, megabytes=0.2, bpe=300, gpt2=400, memory=(1, 2))
    assert_figures(figures, "byte_mb_per_second", "bpe_share_of_faster", "gpt2_share_of_faster",
                   "gpt2_encode_share_of_faster_one_core", "bpe_tokenizers_mb_per_second_one_core",
                   "memory_1mb", "memory_2mb", "memory_growth_mb")  # fmt: skip
    faster = max(float(figures[f"bpe_{name}_mb_per_second"]) for name in ("tiktoken", "tokenizers"))
    share = float(figures["bpe_mb_per_second"]) / faster
    assert figures["bpe_share_of_faster"] == pytest.approx(share)
    assert figures["gpt2_vocabulary"] == "a stand-in of 400 ids"
    assert cores() == before


def test_the_build_that_is_timed_is_the_build(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    write_lines(path, texts(PIECES, 0.1))
    for tokenizer in (ByteTokenizer(), BPE):
        build_with(tokenizer, path)
        dataset = Dataset.open(tmp_path / "dataset")
        assert dataset.tokenizer_fingerprint == tokenizer.fingerprint
        manifest = dataset.manifest
        assert manifest is not None
        size = sum(len(document.text.encode()) for document in open_corpus([str(path)]).documents())
        assert sum(split.bytes for split in manifest.splits.values()) == size
    learned = build_dataset([str(path)], tmp_path / "learned", "bpe:300")
    assert manifest is not None
    assert learned.source_fingerprint == manifest.source_fingerprint
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["dataset", "learned", path.name]


def test_a_rival_with_other_ids_is_no_rival() -> None:
    check_same_ids(BPE, PIECES)
    check_same_ids(ByteTokenizer(), PIECES)
    other = train_bpe([PIECES[0]], 300)
    mixed = BpeTokenizer(
        "bpe:300",
        {token: rank for rank, token in enumerate(BPE.tokens[:-1])},
        {BPE_FILE: other.files[BPE_FILE]},
    )
    with pytest.raises(AssertionError, match="tokenizers gives other ids"):
        check_same_ids(mixed, PIECES)


def test_texts_are_of_the_size_asked_for_and_all_different() -> None:
    found = [*texts(PIECES, 0.5)]
    assert 500_000 <= sum(len(text.encode()) for text in found) < 510_000
    assert len({*found}) == len(found)
    assert found == [*texts(PIECES, 0.5)]
    assert [size_name(size) for size in (100, 2000)] == ["100mb", "2gb"]


def test_the_text_is_the_standard_library() -> None:
    assert any("class JSONDecoder" in text for text in standard_library())
