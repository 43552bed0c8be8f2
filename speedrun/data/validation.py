"""The tokens a run is validated on, in batches that ranks take in turn.

A split is cut into rows of T + 1 tokens, as for training. Which of them are taken: the first, which
is the public speedrun's rule; some spread evenly over the whole split, so that no few long files
decide; or some of those that lie between the spread ones, for choices that must not look at what
they will be judged by.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from speedrun.data.loader import Batch, make_batch, rows_per_rank
from speedrun.data.shards import Split
from speedrun.errors import ConfigError, DataError

SPREAD, FIRST, BETWEEN, LAST = "spread", "first", "between", "last"


def rows_in(split: Split, seq_len: int) -> int:
    """Whole rows of a split; the last target of one is one token past its last input."""
    return max(0, split.tokens - 1) // seq_len


def choose_rows(available: int, count: int, how: str) -> NDArray[np.int64]:
    """Which `count` of the rows, in order.

    `between` are those beside `count` spread ones, and fewer than that where there are no more.
    """
    if how == FIRST:
        return np.arange(count)
    if how == LAST:
        return np.arange(available - count, available)
    spread = (2 * np.arange(count) + 1) * available // (2 * count)
    if how == SPREAD:
        return spread
    others = np.setdiff1d(np.arange(available), spread)
    some = min(count, len(others))
    return others[(2 * np.arange(some) + 1) * len(others) // (2 * max(1, some))]


class ValidationBatches:
    """Some rows of a split, in order.

    Every batch is whole, so the mean over batches of their mean losses is the token mean.
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
        how: str = SPREAD,
        device: str | torch.device = "cpu",
        pinned: bool = True,
    ) -> None:
        self._n = rows_per_rank(seq_len, batch_tokens, world=1)
        if tokens < 1 or tokens % batch_tokens:
            raise ConfigError(
                f"validation.tokens={tokens} is not a whole number of batches of {batch_tokens}; "
                f"set validation.tokens={max(1, tokens // batch_tokens) * batch_tokens}"
            )
        rows, wanted = rows_in(split, seq_len), tokens // seq_len
        if rows < wanted:
            fits = rows * seq_len // batch_tokens * batch_tokens
            raise DataError(
                f"split {split.name} holds {split.tokens} tokens, validation needs {tokens + 1}; "
                + (f"set validation.tokens={fits}" if fits > 0 else "build it from more text")
            )
        chosen = choose_rows(rows, wanted, how)
        chosen = chosen[: len(chosen) // self._n * self._n]  # whole batches
        if not len(chosen):
            raise DataError(
                f"of the {rows} sequences of split {split.name} validation takes {wanted}, which "
                "leaves none between them to tune on; build the dataset with a larger "
                "--val-fraction, or lower validation.tokens"
            )
        self._rows = split.rows(chosen, seq_len, vocab_size)
        self._eot, self._device, self._seq_len = eot, torch.device(device), seq_len
        self._pinned = pinned and self._device.type == "cuda"

    @property
    def tokens(self) -> int:
        return len(self._rows) * self._seq_len

    def __len__(self) -> int:
        return len(self._rows) // self._n

    def of_rank(self, rank: int, world: int) -> Iterator[tuple[int, Batch]]:
        """Every `world`-th batch, from number `rank` on, with its number; no other is built."""
        for index in range(rank, len(self), world):
            rows = self._rows[index * self._n : (index + 1) * self._n]
            batch = make_batch(rows, self._eot, pinned=self._pinned)
            yield index, batch.to(self._device)
