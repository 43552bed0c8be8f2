"""Validation batches: the first tokens of the split, each batch for one rank."""

import itertools
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import speedrun.data.validation
from speedrun.data.dataset import Dataset
from speedrun.data.loader import Batch, make_batch
from speedrun.data.shards import Split
from speedrun.data.validation import ValidationBatches
from speedrun.errors import ConfigError, DataError
from tests.data.test_loader import BATCH, EOT, SEQ, VOCAB, as_lists, make_split, same, twin


def validation(split: Split, tokens: int, **options: Any) -> ValidationBatches:
    defaults = {"seq_len": SEQ, "batch_tokens": BATCH, "vocab_size": VOCAB, "eot": EOT}
    return ValidationBatches(split, tokens=tokens, **{**defaults, **options})


def test_validation_is_the_first_tokens_in_order(tmp_path: Path) -> None:
    split, shards = make_split(tmp_path, [100, 20, 100], "val")
    stream = list(itertools.chain(*shards))
    rows = [stream[start : start + SEQ + 1] for start in range(0, 192, SEQ)]
    batches = validation(split, 192)
    assert len(batches) == 3
    expected = [twin(rows[first : first + 8]) for first in (0, 8, 16)]
    for _ in range(2):  # the same again at every validation
        assert [as_lists(batch) for _, batch in batches.of_rank(0, 1)] == expected


def test_validation_at_the_scale_of_the_records(tmp_path: Path) -> None:
    with (tmp_path / "fineweb_val_000000.bin").open("wb") as file:
        file.write(struct.pack("<3i", 20240520, 1, 100_000_000))
        file.truncate(1024 + 200_000_000)
    split = Dataset.open(tmp_path).split("val")
    batches = validation(
        split, 10_485_760, seq_len=65_536, batch_tokens=524_288, vocab_size=50_257, eot=50_256
    )
    assert len(batches) == 20
    _, batch = next(batches.of_rank(0, 1))
    assert 20 * batch.targets.numel() == 10_485_760


def test_validation_mistakes_are_named(tmp_path: Path) -> None:
    split, _ = make_split(tmp_path, [128], "val")
    with pytest.raises(DataError, match=r"holds 128 tokens.* needs 129; set validation.tokens=64"):
        validation(split, 128)
    with pytest.raises(ConfigError, match=r"validation.tokens=100 .* set validation.tokens=64"):
        validation(split, 100)
    short, _ = make_split(tmp_path, [30], "val")
    with pytest.raises(DataError, match="more text"):
        validation(short, 64)


def test_ranks_take_turns_and_build_only_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split, _ = make_split(tmp_path, [321], "val")
    batches = validation(split, 320)
    whole = dict(batches.of_rank(0, 1))
    assert list(whole) == [0, 1, 2, 3, 4]
    built = 0

    def counted(*arguments: Any, **options: Any) -> Batch:
        nonlocal built
        built += 1
        return make_batch(*arguments, **options)

    monkeypatch.setattr(speedrun.data.validation, "make_batch", counted)
    for world in (2, 3, 8):
        built = 0
        parts = [dict(batches.of_rank(rank, world)) for rank in range(world)]
        assert [list(part) for part in parts] == [list(range(r, 5, world)) for r in range(world)]
        assert all(same(batch, whole[i]) for part in parts for i, batch in part.items())
        assert built == 5


def test_validation_batches_go_to_the_device(tmp_path: Path) -> None:
    split, _ = make_split(tmp_path, [500], "val")
    _, batch = next(validation(split, 64, device=torch.device("meta")).of_rank(0, 1))
    assert batch.targets.device.type == "meta"
