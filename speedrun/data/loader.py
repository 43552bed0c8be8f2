"""Batches from shards: the global batch of step s is a function of (dataset, seed, s) and no more.

A shard is cut into rows of T + 1 tokens that overlap by one, so row i gives the inputs
tokens[iT : iT+T] and the targets one token later. A global batch is S rows of one shard, and rank r
of W takes rows rS/W to (r+1)S/W of it: any number of ranks together sees the same rows. All ranks
change shard together and tokens short of a whole batch at a shard's end are left out: 385,280 of
100 million at 524,288 a batch, which is the rule of record 18.

Two threads keep ahead of the consumer. The reader loads the next shard while the current one is in
use; the builder keeps `prefetch` batches ready, in pinned memory when they go to a GPU. Shards need
not be pinned: the GPU copies from batches, which are made of the shard's two-byte tokens here.

Shapes: n rows of this rank, T time.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from speedrun.data.shards import KEEP_BYTES, TOKEN_DTYPE, Split, Tokens, read_tokens
from speedrun.errors import ConfigError, DataError

PREFETCH = 2
Order = Literal["sequential", "shuffled"]
Visit = tuple[Tokens, NDArray[np.intp] | None]  # a shard's rows, and their order if not as they are


@dataclass(frozen=True)
class Batch:
    """What the model sees of n rows, each of shape (n, T)."""

    inputs: torch.Tensor  # int32
    targets: torch.Tensor  # int64, the inputs one token later
    documents: torch.Tensor  # int32, see `document_ids`

    def to(self, device: torch.device) -> Batch:
        """Copy without waiting; torch keeps a pinned source alive until its copy is done."""
        return Batch(**{name: t.to(device, non_blocking=True) for name, t in vars(self).items()})

    def split(self, parts: int) -> list[Batch]:
        """As `parts` batches of equally many rows."""
        pieces = zip(*(tensor.chunk(parts) for tensor in vars(self).values()), strict=True)
        return [Batch(*piece) for piece in pieces]


def rows_of(tokens: Tokens, seq_len: int) -> Tokens:
    """All rows of T + 1 tokens as a view: row i starts at token iT."""
    return np.lib.stride_tricks.sliding_window_view(tokens, seq_len + 1)[::seq_len]


def document_ids(tokens_nT: Tokens, eot: int) -> NDArray[np.int32]:
    """Number every token's document, counted anew in each row; end-of-text opens a document."""
    return np.cumsum(tokens_nT == eot, axis=1, dtype=np.int32)


def make_batch(rows: Tokens, eot: int, *, pinned: bool = False) -> Batch:
    """Inputs, targets and document ids of rows of T + 1 tokens, in host memory.

    In numpy throughout, which stays on this thread: torch operators here could bring OpenMP threads
    that compete with the training step's. The tensors are fresh, since the consumer may keep them;
    torch caches pinned memory itself.
    """
    shape = rows.shape[0], rows.shape[1] - 1
    inputs, documents = torch.empty((2, *shape), dtype=torch.int32, pin_memory=pinned)
    targets = torch.empty(shape, dtype=torch.int64, pin_memory=pinned)
    np.copyto(inputs.numpy(), rows[:, :-1])
    np.copyto(targets.numpy(), rows[:, 1:])
    np.copyto(documents.numpy(), document_ids(rows[:, :-1], eot))
    return Batch(inputs, targets, documents)


def permutation(count: int, seed: int, *key: int) -> NDArray[np.intp]:
    """A shuffle decided by its arguments: raw PCG64 bits are the same in every numpy version."""
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)).random_raw(count)
    return np.argsort(bits, kind="stable")


class BatchOrder:
    """Where each global batch lies: arithmetic on the lengths of shards, no tokens needed.

    An epoch visits each shard long enough for a batch; of N such, visit v is number v mod N of
    epoch v div N.
    """

    def __init__(self, counts: Sequence[int], batch_tokens: int, seed: int, order: Order) -> None:
        batches = (np.array(counts, dtype=np.int64) - 1) // batch_tokens
        self.seed, self.shuffled = seed, order == "shuffled"
        self.batches = batches.clip(min=0)
        self.usable = np.flatnonzero(self.batches)
        self.batches_per_epoch = int(self.batches.sum())
        self._drawn = (-1, self.usable)

    def shards(self, epoch: int) -> NDArray[np.intp]:
        """The shards of an epoch in the order of their visits."""
        drawn, order = self._drawn
        if self.shuffled and drawn != epoch:  # asked for at every step, and a draw takes 23 us
            order = self.usable[permutation(len(self.usable), self.seed, epoch)]
            self._drawn = (epoch, order)
        return order

    def locate(self, step: int) -> tuple[int, int]:
        """The visit of a step and which of that shard's batches it is."""
        epoch, step = divmod(step, self.batches_per_epoch)
        ends = self.batches[self.shards(epoch)].cumsum()
        place = int(np.searchsorted(ends, step, side="right"))
        return epoch * len(ends) + place, step - int(ends[place - 1] if place else 0)

    def epoch_and_shard(self, visit: int) -> tuple[int, int]:
        epoch, place = divmod(visit, len(self.usable))
        return epoch, int(self.shards(epoch)[place])


def rows_per_rank(seq_len: int, batch_tokens: int, world: int) -> int:
    if min(seq_len, batch_tokens, world) < 1 or batch_tokens % (seq_len * world):
        raise ConfigError(
            f"a batch of {batch_tokens} tokens cannot be cut into rows of {seq_len} shared equally "
            f"by {world} ranks; choose a multiple of {max(1, seq_len * world)}"
        )
    return batch_tokens // (seq_len * world)


class Loader:
    """An endless iterator over this rank's part of the global batches, from any step.

    `sequential` takes shards by name and rows in order, as the records do. `shuffled` draws the
    order of the shards from (seed, epoch) and of the rows in each from (seed, epoch, shard).
    """

    def __init__(
        self,
        split: Split,
        *,
        seq_len: int,
        batch_tokens: int,
        vocab_size: int,
        eot: int,
        seed: int = 0,
        order: Order = "sequential",
        rank: int = 0,
        world: int = 1,
        device: str | torch.device = "cpu",
        start: int = 0,
        keep_bytes: int = KEEP_BYTES,
        prefetch: int = PREFETCH,
        pinned: bool = True,
    ) -> None:
        self.position = start
        self.wait_seconds = 0.0
        self._n = rows_per_rank(seq_len, batch_tokens, world)
        self._first, self._stride = rank * self._n, world * self._n
        self._seq_len, self._vocab_size, self._eot = seq_len, vocab_size, eot
        self._device = torch.device(device)
        self._pinned = pinned and self._device.type == "cuda"
        self._prefetch = prefetch
        self._paths, self._counts = split.paths, split.counts
        self.schedule = BatchOrder(split.counts, batch_tokens, seed, order)
        self.batches_per_epoch = self.schedule.batches_per_epoch
        if not self.batches_per_epoch:
            raise DataError(
                f"no shard of split {split.name} is long enough for one batch: the largest holds "
                f"{max(split.counts, default=0)} tokens and a batch needs {batch_tokens + 1}; use "
                "more text or a smaller batch"
            )
        self._tokens_of: Callable[[int], Tokens] = self._read
        if split.tokens * TOKEN_DTYPE.itemsize <= keep_bytes:
            self._tokens_of = functools.cache(self._read)
            for shard in self.schedule.usable:
                self._tokens_of(int(shard))

        self._reader = ThreadPoolExecutor(1, "shard-reader")
        self._builder = ThreadPoolExecutor(1, "batch-builder")
        self._visits: dict[int, Future[Visit]] = {}
        # The first shard is read here, so that a bad id in it is an error before training starts.
        self._visit(self.schedule.locate(start)[0])
        self._ready: deque[Future[Batch]] = deque()
        self._fill(prefetch)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        begun = time.perf_counter()
        self._fill(1)
        batch = self._ready[0].result()  # a failed batch stays at the front and fails again
        self.wait_seconds += time.perf_counter() - begun
        self._ready.popleft()
        self.position += 1
        self._fill(self._prefetch)
        return batch.to(self._device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in (self._builder, self._reader):
            pool.shutdown(cancel_futures=True)

    def _fill(self, ahead: int) -> None:
        while len(self._ready) < ahead:
            step = self.position + len(self._ready)
            self._ready.append(self._builder.submit(self._build, step))

    def _build(self, step: int) -> Batch:
        visit, batch = self.schedule.locate(step)
        rows, order = self._visit(visit)
        first = batch * self._stride + self._first
        mine = slice(first, first + self._n)
        chosen = rows[mine] if order is None else rows[order[mine]]
        return make_batch(chosen, self._eot, pinned=self._pinned)

    def _visit(self, visit: int) -> Visit:
        """A visit, with the one after it under way; visits are asked for in order."""
        self._visits.pop(visit - 1, None)
        for wanted in (visit, visit + 1) if self._prefetch else (visit,):
            if wanted not in self._visits:
                self._visits[wanted] = self._reader.submit(self._open, wanted)
        return self._visits[visit].result()

    def _open(self, visit: int) -> Visit:
        epoch, shard = self.schedule.epoch_and_shard(visit)
        rows = rows_of(self._tokens_of(shard), self._seq_len)
        if not self.schedule.shuffled:
            return rows, None
        return rows, permutation(len(rows), self.schedule.seed, epoch, shard)

    def _read(self, shard: int) -> Tokens:
        path, count = self._paths[shard], self._counts[shard]
        tokens = read_tokens(path, vocab_size=self._vocab_size)
        if len(tokens) != count:
            raise DataError(
                f"{path} holds {len(tokens)} tokens by byte 8 of its header, but held {count} when "
                "the dataset was opened; do not change a dataset in use"
            )
        return tokens
