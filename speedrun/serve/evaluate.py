"""The loss of a run on any text: nats per token, bits per byte and perplexity, with their errors.

A document is the ids e, t1 .. tn, where e is end-of-text, and each of t1 .. tn is predicted once
(docs/evaluate.md has the definition in full). A row of ids is what the model sees at a time: all
but the last are its inputs, and the last `scored` are predicted and counted. Rows are never of two
documents. They are sorted by length some thousands at a time, so those that go through the model
together need little padding, which stands on the right, where causal attention does not see it.

Shapes: B rows, T time.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from speedrun.data.corpus import Notes
from speedrun.data.shards import Tokens
from speedrun.errors import ConfigError, DataError
from speedrun.limits import memory_bytes
from speedrun.model.backend import prepare_backend
from speedrun.serve.estimates import (
    Difference,
    Interval,
    difference_of_ratios,
    ratio_of_totals,
)
from speedrun.serve.load import LoadedRun
from speedrun.serve.texts import Texts

PASS_TOKENS = 8192  # through the model at a time
POOL_TOKENS = 32 * PASS_TOKENS  # sorted by length at a time
KEPT_WIDTHS = 16  # floats of a token in widths that a pass holds, and one more for each layer
USABLE = 0.6  # share of the machine's memory that a pass may take
BITS = 1 / math.log(2)
NATS_PER_TOKEN, BITS_PER_BYTE = "nats_per_token", "bits_per_byte"

Progress = Callable[[int], None]  # called with the bytes that were read and scored in all


class Row(NamedTuple):
    """Some ids of a document, of which the last `scored` are predicted from those before them."""

    owner: int  # whose it is
    ids: Tokens
    scored: int
    read: float = 0.0  # its share of its document's bytes on disk


def rows_of(owner: int, ids: Tokens, context: int, stride: int, read: int = 0) -> Iterator[Row]:
    """A document's rows of at most `context` inputs.

    The first predicts as many ids as it can. Each later one predicts the next `stride`, or what is
    left, and begins as early as its inputs allow. So but for the first ids of a document every one
    is predicted from at least context - stride + 1 before it.
    """
    n, done = len(ids) - 1, 0
    while done < n:
        end = min(done + (stride if done else context), n)
        yield Row(owner, ids[max(0, end - context) : end + 1], end - done, read * (end - done) / n)
        done = end


class Scorer:
    """Rows through a run's model, in batches of bounded size."""

    def __init__(self, run: LoadedRun) -> None:
        self._model, self._planner = run.model, run.planner
        sizes = run.config.model
        prepare_backend(run.planner.backend, sizes.size_of_head)
        self._bytes_of_token = 4 * sizes.width * (KEPT_WIDTHS + sizes.layers)

    def __call__(self, rows: Iterable[Row]) -> Iterator[tuple[Row, float]]:
        """Each row with the nats of what it predicts, in an order of its own."""
        pool: list[Row] = []
        tokens = 0
        for row in rows:
            pool.append(row)
            tokens += len(row.ids)
            if tokens >= POOL_TOKENS:
                yield from self._all(pool)
                pool, tokens = [], 0
        yield from self._all(pool)

    def _all(self, pool: list[Row]) -> Iterator[tuple[Row, float]]:
        pool.sort(key=lambda row: -len(row.ids))
        begin = 0
        while begin < len(pool):
            together = max(1, PASS_TOKENS // (len(pool[begin].ids) - 1))
            rows = pool[begin : begin + together]
            yield from zip(rows, self._nats(rows), strict=True)
            begin += together

    @torch.inference_mode()
    def _nats(self, rows: Sequence[Row]) -> list[float]:
        """The first row is the longest."""
        length = len(rows[0].ids) - 1
        self._refuse_what_does_not_fit(length)
        inputs_BT = np.zeros((len(rows), length), np.int32)
        targets_BT = np.full((len(rows), length), -1, np.int64)  # negative: not counted
        for index, (_, ids, scored, _) in enumerate(rows):
            last = len(ids) - 1
            inputs_BT[index, :last] = ids[:-1]
            targets_BT[index, last - scored : last] = ids[-scored:]
        plan = self._planner.plan(torch.zeros(len(rows), length, dtype=torch.int32))
        inputs, targets = torch.from_numpy(inputs_BT), torch.from_numpy(targets_BT)
        losses_BT = self._model(inputs, plan, targets, each=True)
        sums: list[float] = losses_BT.double().sum(1).tolist()
        return sums

    def _refuse_what_does_not_fit(self, length: int) -> None:
        needed, there = length * self._bytes_of_token, memory_bytes()
        if length > PASS_TOKENS and needed > USABLE * there:
            fits = int(USABLE * there) // self._bytes_of_token
            raise ConfigError(
                f"a row of {length:,} tokens takes about {needed / 2**30:.0f} GiB and this machine "
                f"has {there / 2**30:.0f}: use a --context of at most {fits:,}"
            )


@dataclass(frozen=True)
class Scored:
    """What every document cost a run, in the order they were read."""

    files: list[str] = field(default_factory=list)
    file: array[int] = field(default_factory=lambda: array("q"))  # of each document, its number
    nats: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[int] = field(default_factory=lambda: array("q"))
    bytes: array[int] = field(default_factory=lambda: array("q"))
    notes: Notes = field(default_factory=Counter)


def score(
    run: LoadedRun, texts: Texts, context: int, stride: int, progress: Progress = lambda _: None
) -> Scored:
    """Every document of the texts, one pass over them."""
    found = Scored()

    def rows() -> Iterator[Row]:
        for text in texts.documents(run.tokenizer, found.notes):
            if not found.files or found.files[-1] != text.file:
                found.files.append(text.file)
            number = len(found.file)
            found.file.append(len(found.files) - 1)
            found.nats.append(0.0)
            found.tokens.append(len(text.ids) - 1)
            found.bytes.append(text.bytes)
            yield from rows_of(number, text.ids, context, stride, text.read)

    done = 0.0
    for row, nats in Scorer(run)(rows()):
        found.nats[row.owner] += nats
        done += row.read
        progress(int(done))
    return found


@dataclass(frozen=True)
class Loss:
    """The loss on some documents, by the keys of `--json`; `stderr` is that of nats per token."""

    documents: int
    tokens: int
    bytes: int
    nats_per_token: float
    stderr: float | None
    interval: Interval | None
    bits_per_byte: float
    bits_per_byte_stderr: float | None
    bits_per_byte_interval: Interval | None
    perplexity: float

    @staticmethod
    def of(nats: Sequence[float], tokens: Sequence[int], sizes: Sequence[int]) -> Loss:
        per_token = ratio_of_totals(nats, tokens)
        per_byte = ratio_of_totals([BITS * one for one in nats], sizes)
        try:
            perplexity = math.exp(per_token.value)
        except OverflowError:
            perplexity = math.inf
        return Loss(
            len(nats), sum(tokens), sum(sizes),
            per_token.value, per_token.stderr, per_token.interval,
            per_byte.value, per_byte.stderr, per_byte.interval, perplexity,
        )  # fmt: skip


def total(scored: Scored) -> Loss:
    return Loss.of(scored.nats, scored.tokens, scored.bytes)


def by_file(scored: Scored) -> list[tuple[str, Loss]]:
    """The loss on each file; a dataset's split counts as one."""
    members: list[list[int]] = [[] for _ in scored.files]
    for index, file in enumerate(scored.file):
        members[file].append(index)
    return [
        (
            name,
            Loss.of(
                [scored.nats[i] for i in chosen],
                [scored.tokens[i] for i in chosen],
                [scored.bytes[i] for i in chosen],
            ),
        )
        for name, chosen in zip(scored.files, members, strict=True)
    ]


def difference(second: Scored, first: Scored, *, same_tokenizer: bool) -> tuple[str, Difference]:
    """What is compared, and the second run's less the first's, document by document.

    Of nats per token where a token is the same for both, else of bits per byte.
    """
    if second.file != first.file or second.bytes != first.bytes:
        raise DataError("the texts changed while they were read: judge both runs once more")
    if same_tokenizer:
        return NATS_PER_TOKEN, difference_of_ratios(second.nats, first.nats, first.tokens)
    bits_of_second, bits_of_first = ([BITS * nats for nats in one.nats] for one in (second, first))
    return BITS_PER_BYTE, difference_of_ratios(bits_of_second, bits_of_first, first.bytes)
