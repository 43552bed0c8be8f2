"""The tokens a run is validated on, in batches that ranks take in turn."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from speedrun.data.loader import Batch, make_batch, rows_of, rows_per_rank
from speedrun.data.shards import Split
from speedrun.errors import ConfigError, DataError


class ValidationBatches:
    """The first `tokens` tokens of a split, in order.

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
        device: str | torch.device = "cpu",
    ) -> None:
        self._n = rows_per_rank(seq_len, batch_tokens, world=1)
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
        self._eot, self._device = eot, torch.device(device)

    def __len__(self) -> int:
        return len(self._rows) // self._n

    def of_rank(self, rank: int, world: int) -> Iterator[tuple[int, Batch]]:
        """Every `world`-th batch, from number `rank` on, with its number; no other is built."""
        for index in range(rank, len(self), world):
            rows = self._rows[index * self._n : (index + 1) * self._n]
            batch = make_batch(rows, self._eot, pinned=self._device.type == "cuda")
            yield index, batch.to(self._device)
