"""The loader against plain-Python twins: record 18's walk over shards, and loops over documents."""

import itertools
import os
import struct
import sys
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speedrun.bench.loader import measure_loader
from speedrun.data.dataset import Dataset
from speedrun.data.loader import (
    Batch,
    BatchOrder,
    Loader,
    Order,
    make_batch,
    permutation,
    rows_of,
)
from speedrun.data.shards import Split, write_shard
from speedrun.data.validation import ValidationBatches
from speedrun.errors import ConfigError, DataError
from tests.waiting import wait_for

VOCAB, EOT = 50, 49
SEQ, BATCH = 8, 64  # eight rows, so eight ranks can share a batch
ORDERS: tuple[Order, ...] = ("sequential", "shuffled")


def make_split(
    folder: Path, counts: Sequence[int], name: str = "train"
) -> tuple[Split, list[list[int]]]:
    random = np.random.default_rng(len(counts))
    shards, paths = [], []
    for index, count in enumerate(counts):
        tokens = random.integers(0, EOT, count)
        tokens[random.random(count) < 0.2] = EOT
        paths.append(folder / f"x_{name}_{index:06d}.bin")
        write_shard(paths[-1], tokens)
        shards.append([int(token) for token in tokens])
    return Split(name, tuple(paths), tuple(counts)), shards


def make_loader(split: Split, **options: Any) -> Loader:
    defaults = {"seq_len": SEQ, "batch_tokens": BATCH, "vocab_size": VOCAB, "eot": EOT}
    return Loader(split, **{**defaults, **options})


def take(loader: Loader, count: int) -> list[Batch]:
    with loader:
        return list(itertools.islice(loader, count))


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def record_18(shards: list[list[int]]) -> Iterator[list[int]]:
    """B + 1 tokens at a time; go to the next shard when this one cannot give them, and round."""
    shard = at = 0
    while True:
        while at + BATCH + 1 > len(shards[shard]):
            shard, at = (shard + 1) % len(shards), 0
        yield shards[shard][at : at + BATCH + 1]
        at += BATCH


def twin(rows: list[list[int]], eot: int = EOT) -> dict[str, list[list[int]]]:
    """Inputs, targets and document ids, one token at a time."""
    result: dict[str, list[list[int]]] = {"inputs": [], "targets": [], "documents": []}
    for row in rows:
        documents, document = [], 0
        for token in row[:-1]:
            document += token == eot
            documents.append(document)
        for name, values in zip(result, (row[:-1], row[1:], documents), strict=True):
            result[name].append(values)
    return result


def as_lists(batch: Batch) -> dict[str, list[list[int]]]:
    return {name: tensor.tolist() for name, tensor in vars(batch).items()}


def test_sequential_is_record_18_token_by_token(tmp_path: Path) -> None:
    # 321 = 5 * 64 + 1 gives five batches and 320 only four; 40 and 64 give none; 65 gives one.
    split, shards = make_split(tmp_path, [321, 320, 40, 65, 64, 200])
    expected = record_18(shards)
    for batch in take(make_loader(split, keep_bytes=0), 40):
        tokens = next(expected)
        rows = [tokens[start : start + SEQ + 1] for start in range(0, BATCH, SEQ)]
        assert as_lists(batch) == twin(rows)
        assert batch.targets.dtype == torch.int64
        assert {batch.inputs.dtype, batch.documents.dtype} == {torch.int32}


def test_sequential_at_the_scale_of_the_records(tmp_path: Path) -> None:
    for index in range(1, 9):  # sparse files: full length, no disk space
        with (tmp_path / f"fineweb_train_{index:06d}.bin").open("wb") as file:
            file.write(struct.pack("<3i", 20240520, 1, 100_000_000))
            file.truncate(1024 + 200_000_000)
    counts = Dataset.open(tmp_path).split("train").counts
    schedule = BatchOrder(counts, 524_288, 0, "sequential")
    assert schedule.batches.tolist() == [190] * 8
    assert 100_000_000 - 190 * 524_288 == 385_280
    assert schedule.locate(0) == (0, 0)
    assert schedule.locate(189) == (0, 189)
    assert schedule.locate(190) == (1, 0)
    assert schedule.locate(1389) == (7, 59)  # the last of 1390 steps, 7.32 shards in
    assert schedule.locate(8 * 190 + 5) == (8, 5)
    assert schedule.epoch_and_shard(8) == (1, 0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("keep_bytes", [0, 1 << 20])
def test_any_number_of_ranks_sees_the_same_rows(
    tmp_path: Path, order: Order, keep_bytes: int
) -> None:
    split, _ = make_split(tmp_path, [500, 130, 321])
    steps = 30  # two epochs and a half
    whole = take(make_loader(split, order=order, seed=5, keep_bytes=keep_bytes), steps)
    for world in (2, 4, 8):
        ranks = [
            take(make_loader(split, order=order, seed=5, rank=rank, world=world), steps)
            for rank in range(world)
        ]
        for batch, *parts in zip(whole, *ranks, strict=True):
            assert all(len(part.inputs) == BATCH // SEQ // world for part in parts)
            for name, tensor in vars(batch).items():
                assert torch.equal(tensor, torch.cat([getattr(part, name) for part in parts]))


def test_shuffled_is_its_plain_twin(tmp_path: Path) -> None:
    split, shards = make_split(tmp_path, [500, 130, 321, 30])

    def shuffle(count: int, *key: int) -> list[int]:
        bits = np.random.PCG64(np.random.SeedSequence(7, spawn_key=key)).random_raw(count).tolist()
        return sorted(range(count), key=bits.__getitem__)

    expected = []
    for epoch in range(3):
        for shard in shuffle(3, epoch):
            order = shuffle((len(shards[shard]) - 1) // SEQ, epoch, shard)
            for first in range(0, len(order) - BATCH // SEQ + 1, BATCH // SEQ):
                rows = [
                    shards[shard][SEQ * row : SEQ * row + SEQ + 1]
                    for row in order[first : first + BATCH // SEQ]
                ]
                expected.append(twin(rows))
    for keep_bytes in (0, 1 << 20):
        batches = take(
            make_loader(split, order="shuffled", seed=7, keep_bytes=keep_bytes), len(expected)
        )
        assert [as_lists(batch) for batch in batches] == expected
    other = take(make_loader(split, order="shuffled", seed=8), len(expected))
    assert [as_lists(batch) for batch in other] != expected


def test_shuffles_never_change() -> None:
    # A run resumed under another numpy must see the same tokens, so these are fixed for good.
    assert permutation(8, 0, 0).tolist() == [6, 3, 1, 4, 5, 2, 7, 0]
    assert permutation(8, 1337, 2, 3).tolist() == [3, 0, 5, 4, 6, 2, 7, 1]


def test_an_epoch_visits_no_row_twice(tmp_path: Path) -> None:
    path = tmp_path / "x_train_000000.bin"
    write_shard(path, np.arange(40 * SEQ + 1))
    split = Split("train", (path,), (40 * SEQ + 1,))
    loader = make_loader(split, order="shuffled", vocab_size=1000)
    batches = take(loader, 2 * loader.batches_per_epoch)
    first, second = (
        torch.cat([b.inputs[:, 0] for b in half]) for half in (batches[:5], batches[5:])
    )
    assert sorted(first.tolist()) == list(range(0, 40 * SEQ, SEQ))
    assert sorted(second.tolist()) == sorted(first.tolist())
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize("order", ORDERS)
def test_starting_anywhere_equals_iterating(tmp_path: Path, order: Order) -> None:
    split, _ = make_split(tmp_path, [500, 130, 321])
    batches = take(make_loader(split, order=order), 40)
    for step in (17, 38, 0, 13, 14, 12, 26, 18, 2):
        with make_loader(split, order=order, start=step, keep_bytes=0) as loader:
            assert loader.position == step
            assert same(next(loader), batches[step])
            assert same(next(loader), batches[step + 1])
            assert loader.position == step + 2
            assert loader.wait_seconds > 0


def test_batches_are_made_before_they_are_asked_for(tmp_path: Path) -> None:
    split, _ = make_split(tmp_path, [500])
    with make_loader(split) as loader:
        next(loader)
        wait_for(lambda: all(future.done() for future in loader._ready), "batches ahead")
        assert len(loader._ready) == 2
    assert not [t for t in threading.enumerate() if t.name.startswith(("batch-b", "shard-r"))]


def test_without_prefetching_batches_are_made_when_they_are_asked_for(tmp_path: Path) -> None:
    split, _ = make_split(tmp_path, [500, 500])
    expected = take(make_loader(split), 9)
    with make_loader(split, prefetch=0) as loader:
        for batch in expected:
            assert not loader._ready
            assert len(loader._visits) == 1, "no shard is read ahead"
            assert same(next(loader), batch)


@pytest.mark.parametrize(
    ("device", "pinned", "expected"),
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)],
)
def test_batches_for_a_gpu_are_made_in_pinned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, pinned: bool, expected: bool
) -> None:
    """Which only a machine with a GPU has, so here it is seen that it is asked for."""
    asked, empty = [], torch.empty

    def noted(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(*size, **options)

    split, _ = make_split(tmp_path, [500])
    monkeypatch.setattr(torch, "empty", noted)
    with make_loader(split, device=device, pinned=pinned) as loader:
        loader._ready[0].result()
        validation = ValidationBatches(
            split, seq_len=SEQ, tokens=BATCH, batch_tokens=BATCH, vocab_size=VOCAB, eot=EOT,
            device=device, pinned=pinned,
        )  # fmt: skip
        made = len(asked)
        if device == "cpu":
            [*validation.of_rank(0, 1)]
        else:
            with pytest.raises((RuntimeError, AssertionError)):  # there is no such device
                [*validation.of_rank(0, 1)]
    assert made
    assert len(asked) > made
    assert set(asked) == {expected}


def test_a_batch_stays_as_it_was_given(tmp_path: Path) -> None:
    split, _ = make_split(tmp_path, [500])
    with make_loader(split) as loader:
        first = next(loader)
        before = as_lists(first)
        for _ in range(20):
            next(loader)
        assert as_lists(first) == before


def test_a_large_split_holds_two_shards_at_a_time(tmp_path: Path) -> None:
    size = 1 << 20
    split, _ = make_split(tmp_path, [size // 2 + 1] * 6)
    tracemalloc.start()
    try:
        with make_loader(split, seq_len=1024, batch_tokens=8192, keep_bytes=0) as loader:
            tracemalloc.reset_peak()
            for _ in range(loader.batches_per_epoch):
                next(loader)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The id check of a shard and the few batches under way come on top of two shards.
    assert 2 * size <= peak < 3 * size


def test_batches_go_to_the_device(tmp_path: Path) -> None:
    split, _ = make_split(tmp_path, [500])
    (batch,) = take(make_loader(split, device="meta"), 1)
    assert {tensor.device.type for tensor in vars(batch).values()} == {"meta"}


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=1, max_size=5))
def test_documents_are_their_plain_twins(rows: list[list[int]]) -> None:
    assert as_lists(make_batch(np.array(rows, dtype=np.uint16), eot=0)) == twin(rows, eot=0)


def test_damage_met_on_the_way_reaches_the_consumer(tmp_path: Path) -> None:
    split, _ = make_split(tmp_path, [3 * BATCH + 1, BATCH + 1])
    with split.paths[1].open("r+b") as file:
        file.seek(1024 + 2 * 60)
        file.write(struct.pack("<H", VOCAB))
    with make_loader(split, keep_bytes=0) as loader:
        for _ in range(3):
            next(loader)
        for _ in range(2):  # and stays there: no batch is passed over
            with pytest.raises(DataError, match=r"x_train_000001.bin holds token 50 at byte 1144"):
                next(loader)
        assert loader.position == 3
    split.paths[1].write_bytes(split.paths[1].read_bytes()[:-10])
    with make_loader(split, keep_bytes=0, start=2) as loader:
        next(loader)
        with pytest.raises(DataError, match=r"x_train_000001.bin is truncated at byte 1144"):
            next(loader)
    write_shard(split.paths[1], np.zeros(5 * BATCH, dtype=np.uint16))
    with make_loader(split, keep_bytes=0, start=2) as loader:
        next(loader)
        with pytest.raises(DataError, match=r"holds 320 tokens .* held 65"):
            next(loader)


@pytest.mark.parametrize(("bad", "keep_bytes"), [(0, 0), (0, 1 << 20), (1, 1 << 20)])
def test_damage_is_found_before_training_where_possible(
    tmp_path: Path, bad: int, keep_bytes: int
) -> None:
    split, _ = make_split(tmp_path, [200, 200])
    with split.paths[bad].open("r+b") as file:
        file.seek(1024)
        file.write(struct.pack("<H", 65_535))
    with pytest.raises(DataError, match=f"00000{bad}.bin holds token 65535 at byte 1024"):
        make_loader(split, keep_bytes=keep_bytes)


def test_mistakes_are_named(tmp_path: Path) -> None:
    split, _ = make_split(tmp_path, [64, 40])
    with pytest.raises(DataError, match="largest holds 64 tokens and a batch needs 65"):
        make_loader(split)
    with pytest.raises(ConfigError, match=r"batch of 64 tokens .* rows of 8 .* 3 ranks.* 24"):
        make_loader(split, world=3)
    with pytest.raises(ConfigError, match=r"batch of 64 tokens .* rows of 10"):
        make_loader(split, seq_len=10)


@pytest.mark.parametrize("order", ORDERS)
def test_the_benchmark_reports_its_rate(order: Order) -> None:
    def freedom() -> tuple[int, object]:
        return torch.get_num_threads(), getattr(os, "sched_getaffinity", id)(0)

    before = freedom()
    figures = measure_loader(tokens=600_000, seq_len=512, batch_tokens=8192, order=order, repeats=2)
    assert freedom() == before  # the whole machine is given back
    rate, seconds = float(figures["tokens_per_second"]), float(figures["seconds_per_batch"])
    assert rate == pytest.approx(8192 / seconds, rel=1e-3)


def test_no_python_runs_for_each_token() -> None:
    """A batch of 64 times the tokens takes the same number of Python's own operations."""

    def operations(seq_len: int) -> int:
        count = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal count
            frame.f_trace_opcodes = True
            count += event == "opcode"
            return trace

        tokens = np.arange(4 * seq_len + 1, dtype=np.uint16) % 50
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            make_batch(rows_of(tokens, seq_len), eot=EOT)
        finally:
            sys.settrace(before)
        return count

    operations(16)  # what runs once only
    assert operations(16) == operations(1024) > 0
