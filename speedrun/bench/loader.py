"""How fast the loader makes batches, all of its work on one core.

Both loader threads and the consumer are held on one core and read synthetic shards from the page
cache, so the figure is the whole cost of a token: reading it, checking its id, and making its
input, target, document id and position.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import torch

from speedrun.bench.timing import Figures, seconds_of
from speedrun.data.loader import Loader, Order
from speedrun.data.shards import PUBLIC_EOT, PUBLIC_VOCAB, TOKEN_DTYPE, Split, write_shard


@contextmanager
def one_core() -> Iterator[None]:
    """Hold this thread, the threads it starts, and torch's operators on a single core."""
    threads = torch.get_num_threads()
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    torch.set_num_threads(1)
    if allowed:
        os.sched_setaffinity(0, {min(allowed)})
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if allowed:
            os.sched_setaffinity(0, allowed)


def synthetic_split(folder: Path, tokens: int, shards: int) -> Split:
    """Random tokens in documents of geometric length; 660 is about FineWeb's mean."""
    random = np.random.default_rng(0)
    paths = tuple(folder / f"bench_train_{index:06d}.bin" for index in range(shards))
    for path in paths:
        data = random.integers(0, PUBLIC_EOT, tokens // shards, dtype=TOKEN_DTYPE)
        data[random.random(len(data)) < 1 / 660] = PUBLIC_EOT
        write_shard(path, data)
    return Split("train", paths, (tokens // shards,) * shards)


def measure_loader(
    *,
    tokens: int = 20_000_000,
    seq_len: int = 65_536,
    batch_tokens: int = 524_288,
    order: Order = "sequential",
    repeats: int = 5,
) -> Figures:
    """Median tokens per second over passes through three shards that are read again each time."""
    with tempfile.TemporaryDirectory() as folder, one_core():
        split = synthetic_split(Path(folder), tokens, shards=3)
        with Loader(
            split,
            seq_len=seq_len,
            batch_tokens=batch_tokens,
            vocab_size=PUBLIC_VOCAB,
            eot=PUBLIC_EOT,
            order=order,
            keep_bytes=0,
        ) as loader:
            batches = loader.batches_per_epoch

            def one_pass() -> None:
                for _ in range(batches):
                    next(loader)

            seconds = median(seconds_of(one_pass) for _ in range(repeats))
    return {
        "order": order,
        "seq_len": seq_len,
        "batch_tokens": batch_tokens,
        "tokens_per_second": round(batches * batch_tokens / seconds),
        "seconds_per_batch": seconds / batches,
    }
