"""Token tables: the embedding, learned positions, pairs of tokens, and value embeddings.

Value embeddings are extra token tables whose rows are mixed into the attention values of some
layers. They cost no matrix multiplication. Which layer reads which table:
    each      layer i reads table i (record 14)
    mirrored  tables 0..n-1 on the first half, n-1..0 on the second (records 15, 16)
    ends      the first n layers and the last n layers read tables 0..n-1 (records 17, 18)

Shapes: B batch, T time, D width, V vocabulary.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedrun.config.architecture import ModelConfig
from speedrun.config.optimizer import Role
from speedrun.model.cache import Cache

Ids = TypeVar("Ids", int, Tensor)


class Table(nn.Module):
    """Rows looked up by token id; N(0, 1) unless it also serves as the head."""

    def __init__(
        self, rows: int, width: int, *, role: Role, as_head: bool = False, zero: bool = False
    ) -> None:
        super().__init__()
        self.parameter_roles: dict[str, Role] = {"weight": role}
        self.zero = zero
        weight = torch.zeros(rows, width)
        if as_head:  # must be a usable head, so it takes the linear layers' small uniform start
            weight.uniform_(-(width**-0.5), width**-0.5)
        elif not zero:
            weight.normal_()
        self.weight = nn.Parameter(weight)

    def forward(self, ids_BT: Tensor) -> Tensor:
        return F.embedding(ids_BT, self.weight)


def previous_tokens(ids_BT: Tensor, starts_BT: Tensor, cache: Cache | None) -> Tensor:
    """The token before each; -1 at the first token of a row or document, which has none."""
    first_B1 = ids_BT[:, :1] if cache is None else cache.last_B1.to(ids_BT.dtype)
    previous_BT = torch.cat([first_B1, ids_BT[:, :-1]], dim=1)
    return previous_BT.masked_fill(starts_BT, -1)


def hash_pair(ids: Ids, previous: Ids, rows: int) -> Ids:
    """The row of a token with the one before it."""
    return (36313 * ids ^ 27191 * previous) % rows


class Bigrams(nn.Module):
    """An embedding of each token with the one before it, from a hashed table.

    It gives the model bigram statistics without attention. Different pairs may share a row; the
    last row is for tokens that have none before. The table starts at zero, so it adds nothing then.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = Table(rows, width, role="bigram", zero=True)

    def forward(self, ids_BT: Tensor, previous_BT: Tensor) -> Tensor:
        last = len(self.table.weight) - 1
        hashed = hash_pair(ids_BT.long(), previous_BT.long(), last)
        rows: Tensor = self.table(torch.where(previous_BT < 0, last, hashed))
        return rows


def table_of_layer(config: ModelConfig) -> list[int | None]:
    """For each layer the value table it reads, or None; tables that no layer reads are left out."""
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
    """The value tables, and for each layer the rows it mixes into its values."""

    def __init__(self, config: ModelConfig, rows: int) -> None:
        super().__init__()
        self.table_of_layer = table_of_layer(config)
        size = 1 + max((t for t in self.table_of_layer if t is not None), default=-1)
        width = config.groups * config.size_of_head
        self.tables = nn.ModuleList(Table(rows, width, role="value_embedding") for _ in range(size))

    def forward(self, ids_BT: Tensor) -> list[Tensor | None]:
        rows = [table(ids_BT) for table in self.tables]
        return [None if t is None else rows[t] for t in self.table_of_layer]
