"""Validation batches: the first tokens of the split, each batch for one rank."""

import itertools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import speedrun.data.validation
from speedrun.data.dataset import Dataset
from speedrun.data.loader import Batch, make_batch
from speedrun.data.shards import Split
from speedrun.data.validation import ValidationBatches, choose_rows
from speedrun.errors import ConfigError, DataError
from tests.data.test_loader import BATCH, EOT, SEQ, VOCAB, as_lists, make_split, same, twin


def validation(split: Split, tokens: int, **options: Any) -> ValidationBatches:
    defaults = {"seq_len": SEQ, "batch_tokens": BATCH, "vocab_size": VOCAB, "eot": EOT,
                "how": "first"}  # fmt: skip
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
        split,
        10_485_760,
        how="first",
        seq_len=65_536,
        batch_tokens=524_288,
        vocab_size=50_257,
        eot=50_256,
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


def test_rows_are_spread_over_the_whole_split_and_others_lie_between() -> None:
    for available, count in ((825, 256), (100, 7), (16, 16), (17, 16), (9, 1)):
        spread = choose_rows(available, count, "spread")
        gaps = np.diff(spread)
        assert len(spread) == count
        assert spread[0] >= 0 and spread[-1] < available  # noqa: PT018
        assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1 < 2 * available / count
        assert spread[0] <= available / count
        assert available - spread[-1] <= available / count + 1
        between = choose_rows(available, count, "between")
        assert len(between) == min(count, available - count)
        assert not set(between) & set(spread)
        assert (np.diff(between) > 0).all()
    assert choose_rows(9, 3, "first").tolist() == [0, 1, 2]
    assert choose_rows(9, 3, "last").tolist() == [6, 7, 8]


def test_rows_are_read_across_shards(tmp_path: Path) -> None:
    split, shards = make_split(tmp_path, [100, 3, 2, 95], "val")
    stream = list(itertools.chain(*shards))
    numbers = np.array([0, 5, 11, 12, 13, 23])
    expected = [stream[SEQ * n : SEQ * n + SEQ + 1] for n in numbers]
    assert split.rows(numbers, SEQ, VOCAB).tolist() == expected
    batches = validation(split, 8 * 8 * 2, how="spread")
    assert batches.tokens == 128
    found = [row for _, batch in batches.of_rank(0, 1) for row in batch.inputs.tolist()]
    assert found == [stream[SEQ * n : SEQ * n + SEQ] for n in choose_rows(24, 16, "spread")]


def test_too_few_rows_between_are_refused(tmp_path: Path) -> None:
    split, _ = make_split(tmp_path, [129], "val")
    with pytest.raises(DataError, match="leaves none between them to tune on"):
        validation(split, 128, how="between")
    assert validation(split, 64, how="between").tokens == 64
