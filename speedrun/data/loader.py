"""Batches from shards: the global batch of step s is a function of (dataset, seed, s) and no more.

A shard is cut into rows of T + 1 tokens that overlap by one, so row i gives the inputs
tokens[iT : iT+T] and the targets one token later. A global batch is S rows of one shard, and rank r
of W takes rows rS/W to (r+1)S/W of it: any number of ranks together sees the same rows. All ranks
change shard together and tokens short of a whole batch at a shard's end are left out: 385,280 of
100 million at 524,288 a batch, which is the rule of record 18.

Two threads keep ahead of the consumer. The reader loads the next shard while the current one is in
use; the builder keeps `prefetch` batches ready, in pinned memory when they go to a GPU.

Shapes: n rows of this rank, T time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from speedrun.data.shards import TOKEN_DTYPE, Split, Tokens, read_tokens
from speedrun.errors import ConfigError, DataError

Order = Literal["sequential", "shuffled"]
Visit = tuple[Tokens, NDArray[np.intp] | None]  # a shard's rows, and their order if not as they are

# A split that fits in this much memory is read once and kept, as any small corpus is.
KEEP_BYTES = 512 << 20


@dataclass(frozen=True)
class Batch:
    """What the model sees of n rows, each of shape (n, T).

    A row's documents are numbered by the end-of-text tokens seen so far, itself included, from the
    row's first token; a position counts from its document's first token inside the row.
    """

    inputs: torch.Tensor  # int32
    targets: torch.Tensor  # int64, the inputs one token later
    documents: torch.Tensor  # int32
    positions: torch.Tensor  # int32

    def to(self, device: torch.device) -> Batch:
        """Copy without waiting; torch keeps a pinned source alive until its copy is done."""
        return Batch(**{name: t.to(device, non_blocking=True) for name, t in vars(self).items()})


def rows_of(tokens: Tokens, seq_len: int) -> Tokens:
    """All rows of T + 1 tokens as a view: row i starts at token iT."""
    return np.lib.stride_tricks.sliding_window_view(tokens, seq_len + 1)[::seq_len]


def make_batch(rows: Tokens, eot: int, *, pinned: bool = False) -> Batch:
    """Inputs, targets, document ids and positions of rows of T + 1 tokens, in host memory.

    In numpy throughout, which stays on this thread: torch operators here could bring OpenMP threads
    that compete with the training step's. The tensors are fresh, since the consumer may keep them;
    torch caches pinned memory itself.
    """
    n, T = rows.shape[0], rows.shape[1] - 1
    narrow = torch.empty((3, n, T), dtype=torch.int32, pin_memory=pinned)
    targets = torch.empty((n, T), dtype=torch.int64, pin_memory=pinned)
    inputs, documents, positions = narrow.numpy()
    np.copyto(inputs, rows[:, :-1])
    np.copyto(targets.numpy(), rows[:, 1:])
    # Work per document, then one fill per token: running sums over all tokens take twice as long
    # at FineWeb's 660 tokens a document (7.5 against 3.6 ns a token, one core).
    opens = rows[:, :-1] == eot
    begins = opens.copy()
    begins[:, 0] = True  # at a row's edge a document is simply cut
    starts = np.flatnonzero(begins).astype(np.int32)
    lengths = np.diff(starts, append=n * T)
    zeroth = np.searchsorted(starts, T * np.arange(n)) - opens[:, 0]
    numbers = np.arange(len(starts), dtype=np.int32) - zeroth[starts // T]
    documents.reshape(-1)[:] = np.repeat(numbers.astype(np.int32), lengths)
    np.subtract(np.arange(n * T, dtype=np.int32), np.repeat(starts, lengths), positions.reshape(-1))
    return Batch(narrow[0], targets, narrow[1], narrow[2])


def permutation(count: int, seed: int, *key: int) -> NDArray[np.intp]:
    """A shuffle decided by its arguments: raw PCG64 bits are the same in every numpy version."""
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)).random_raw(count)
    return np.argsort(bits, kind="stable")


class Schedule:
    """Where the batch of each step lies: arithmetic on the lengths of shards, no tokens needed.

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


def rows_per_rank(seq_len: int, batch_tokens: int, rank: int, world: int) -> int:
    if min(seq_len, batch_tokens, world) < 1 or batch_tokens % (seq_len * world):
        raise ConfigError(
            f"a batch of {batch_tokens} tokens cannot be cut into rows of {seq_len} shared equally "
            f"by {world} ranks; choose a multiple of {max(1, seq_len * world)}"
        )
    assert 0 <= rank < world
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
        prefetch: int = 2,
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        if order not in ("sequential", "shuffled"):
            raise ConfigError(f"order is {order!r}; it must be 'sequential' or 'shuffled'")
        self.position = start
        self.wait_seconds = 0.0
        self._n = rows_per_rank(seq_len, batch_tokens, rank, world)
        self._first, self._stride = rank * self._n, world * self._n
        self._seq_len, self._vocab_size, self._eot = seq_len, vocab_size, eot
        self._device, self._prefetch = torch.device(device), max(1, prefetch)
        self._paths, self._counts = split.paths, split.counts
        self.schedule = Schedule(split.counts, batch_tokens, seed, order)
        if not self.batches_per_epoch:
            raise DataError(
                f"no shard of split {split.name} is long enough for one batch: the largest holds "
                f"{max(split.counts, default=0)} tokens and a batch needs {batch_tokens + 1}; use "
                "more text or a smaller batch"
            )
        self._kept: dict[int, Tokens] = {}
        self._keep = split.tokens * TOKEN_DTYPE.itemsize <= keep_bytes
        if self._keep:
            for shard in self.schedule.usable:
                self._read(int(shard))

        # The first shard is read here, so that a bad id in it is an error before training starts.
        self._reader = ThreadPoolExecutor(1, "shard-reader")
        self._builder = ThreadPoolExecutor(1, "batch-builder")
        self._visits: dict[int, Future[Visit]] = {}
        first, _ = self.schedule.locate(start)
        self._visits[first] = Future()
        self._visits[first].set_result(self._open(first))
        self._ready: deque[Future[Batch]] = deque()
        self.seek(start)

    @property
    def batches_per_epoch(self) -> int:
        return self.schedule.batches_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        begun = time.perf_counter()
        batch = self._ready[0].result()  # a failed batch stays at the front and fails again
        self.wait_seconds += time.perf_counter() - begun
        self._ready.popleft()
        self.position += 1
        self._fill()
        return batch.to(self._device)

    def seek(self, step: int) -> None:
        """Make `step` the next batch; costs no more than building it."""
        for future in self._ready:
            future.cancel()
        self._ready.clear()
        self.position = step
        self._fill()

    def close(self) -> None:
        for pool in (self._builder, self._reader):
            pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _fill(self) -> None:
        while len(self._ready) < self._prefetch:
            step = self.position + len(self._ready)
            self._ready.append(self._builder.submit(self._build, step))

    def _build(self, step: int) -> Batch:
        visit, batch = self.schedule.locate(step)
        rows, order = self._visit(visit)
        first = batch * self._stride + self._first
        mine = slice(first, first + self._n)
        chosen = rows[mine] if order is None else rows[order[mine]]
        return make_batch(chosen, self._eot, pinned=self._device.type == "cuda")

    def _visit(self, visit: int) -> Visit:
        """A visit, with the one after it under way; called by the builder thread alone."""
        for old in self._visits.keys() - {visit, visit + 1}:
            self._visits.pop(old).cancel()
        for wanted in (visit, visit + 1):
            if wanted not in self._visits:
                self._visits[wanted] = self._reader.submit(self._open, wanted)
        return self._visits[visit].result()

    def _open(self, visit: int) -> Visit:
        epoch, shard = self.schedule.epoch_and_shard(visit)
        rows = rows_of(self._read(shard), self._seq_len)
        if not self.schedule.shuffled:
            return rows, None
        return rows, permutation(len(rows), self.schedule.seed, epoch, shard)

    def _read(self, shard: int) -> Tokens:
        if shard in self._kept:
            return self._kept[shard]
        path, count = self._paths[shard], self._counts[shard]
        tokens = read_tokens(path, vocab_size=self._vocab_size)
        if len(tokens) != count:
            raise DataError(
                f"{path} holds {len(tokens)} tokens by byte 8 of its header, but held {count} when "
                "the dataset was opened; do not change a dataset in use"
            )
        if self._keep:
            self._kept[shard] = tokens
        return tokens


class ValidationBatches:
    """The first `tokens` tokens of a split, in order and once, in the ranks' shares of each batch.

    Every batch is whole, so the mean over batches and ranks of their mean losses is the token mean.
    """

    def __init__(
        self,
        split: Split,
        *,
        tokens: int,
        seq_len: int,
        batch_tokens: int,
        vocab_size: int,
        eot: int,
        rank: int = 0,
        world: int = 1,
        device: str | torch.device = "cpu",
    ) -> None:
        self._n = rows_per_rank(seq_len, batch_tokens, rank, world)
        if tokens < 1 or tokens % batch_tokens:
            raise ConfigError(
                f"validation.tokens={tokens} is not a whole number of batches of {batch_tokens}; "
                f"set validation.tokens={max(1, tokens // batch_tokens) * batch_tokens}"
            )
        # The last target is one token past the last input.
        if split.tokens < tokens + 1:
            fits = (split.tokens - 1) // batch_tokens * batch_tokens
            raise DataError(
                f"split {split.name} holds {split.tokens} tokens, validation needs {tokens + 1}; "
                + (f"set validation.tokens={fits}" if fits > 0 else "build it from more text")
            )
        self._rows = rows_of(split.head(tokens + 1, vocab_size), seq_len)
        self._first, self._stride, self._eot = rank * self._n, world * self._n, eot
        self._device = torch.device(device)

    def __len__(self) -> int:
        return len(self._rows) // self._stride

    def __iter__(self) -> Iterator[Batch]:
        for first in range(self._first, len(self._rows), self._stride):
            rows = self._rows[first : first + self._n]
            batch = make_batch(rows, self._eot, pinned=self._device.type == "cuda")
            yield batch.to(self._device)
