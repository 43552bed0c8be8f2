"""Token tables: the embedding, learned positions, pairs of tokens, and value embeddings.

Value embeddings are extra token tables whose rows are mixed into the attention values of some
layers. They cost no matrix multiplication. Which layer reads which table:
    each      layer i reads table i (record 14)
    mirrored  tables 0..n-1 on the first half, n-1..0 on the second (records 15, 16)
    ends      the first n layers and the last n layers read tables 0..n-1 (records 17, 18)

Shapes: B batch, T time, D width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedrun.config.schema import ModelConfig
from speedrun.model.cache import Cache


class Table(nn.Module):
    """Rows looked up by token id; N(0, 1) unless it also serves as the head."""

    def __init__(
        self, rows: int, width: int, *, role: str, as_head: bool = False, zero: bool = False
    ) -> None:
        super().__init__()
        self.role, self.zero = role, zero
        if zero:
            self.weight = nn.Parameter(torch.zeros(rows, width))
            return
        weight = torch.empty(rows, width)
        bound = width**-0.5
        # A tied table must be a usable head, so it takes the linear layers' small uniform start.
        self.weight = nn.Parameter(weight.uniform_(-bound, bound) if as_head else weight.normal_())

    def forward(self, ids_BT: Tensor) -> Tensor:
        return F.embedding(ids_BT, self.weight)


def tokens_before(ids_BT: Tensor, opens_BT: Tensor, cache: Cache | None) -> Tensor:
    """The token before each; -1 where a row or document opens and there is none."""
    first_B1 = ids_BT[:, :1] if cache is None else cache.newest_B1.to(ids_BT.dtype)
    before_BT = torch.cat([first_B1, ids_BT[:, :-1]], dim=1)
    return before_BT.masked_fill(opens_BT, -1)


class Bigrams(nn.Module):
    """A row for each pair of neighbours, found by hash: what follows a pair needs no attention.

    Different pairs may share a row. The table starts at zero, so it starts as if it were absent.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = Table(rows, width, role="bigram", zero=True)

    def forward(self, ids_BT: Tensor, before_BT: Tensor) -> Tensor:
        last = len(self.table.weight) - 1
        hashed = (36313 * ids_BT.long() ^ 27191 * before_BT.long()) % last
        rows: Tensor = self.table(torch.where(before_BT < 0, last, hashed))
        return rows


def table_of_layer(config: ModelConfig) -> list[int | None]:
    """For each layer the value table it reads, or None; a table that nobody reads is not made."""
    wanted = [None if i in config.attention_free else t for i, t in enumerate(_tables(config))]
    used = sorted({t for t in wanted if t is not None})
    return [None if t is None else used.index(t) for t in wanted]


def _tables(config: ModelConfig) -> list[int | None]:
    count = config.layers
    if config.value_embeddings == "each":
        return list(range(count))
    if config.value_embeddings == "mirrored":
        return [min(i, count - 1 - i) for i in range(count)]
    if config.value_embeddings == "ends":
        first: list[int | None] = list(range(config.value_tables))
        return first + [None] * (count - 2 * len(first)) + first
    return [None] * count


class ValueEmbeddings(nn.Module):
    def __init__(self, config: ModelConfig, rows: int) -> None:
        super().__init__()
        self.table_of_layer = table_of_layer(config)
        size = 1 + max((t for t in self.table_of_layer if t is not None), default=-1)
        width = config.groups * config.size_of_head
        self.tables = nn.ModuleList(Table(rows, width, role="value_embedding") for _ in range(size))

    def forward(self, ids_BT: Tensor) -> list[Tensor | None]:
        rows = [table(ids_BT) for table in self.tables]
        return [None if t is None else rows[t] for t in self.table_of_layer]
