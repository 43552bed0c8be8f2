"""Which keys a query may see, from documents and a window: ranges, block lists, a dense mask.

A query sees itself and the earlier tokens of its own document, back to the edge of its window.
These keys are one contiguous range, `first .. query`, and `first` never decreases along a row.
So one integer per token describes the whole mask (`first_key`), and the lists of full and partial
blocks that FlexAttention takes are arithmetic on it (`block_lists`): no T x T tensor, no sort.
`dense_mask` states the same conditions pair by pair, for tests and short rows.

Legend: B rows, T tokens, Q query blocks, KV key blocks.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from speedrun.config.architecture import BLOCK

# What a window w counts (the values of attention.window); query q sees key k only if
#   tokens           q - k < w
#   blocks           q // BLOCK - k // BLOCK < w
#   tokens_in_blocks q - k < w  and  q // BLOCK - k // BLOCK < ceil(w / BLOCK)
WindowUnit = Literal["none", "tokens", "tokens_in_blocks", "blocks"]


class BlockLists(NamedTuple):
    """Per query block: which key blocks it sees in part (these need the mask) and in full.

    Counts are (B, Q), indices (B, Q, KV); of an index row only the first `count` entries are used.
    """

    partial_count: Tensor
    partial_index: Tensor
    full_count: Tensor
    full_index: Tensor


def document_starts(documents_BT: Tensor) -> Tensor:
    """Which tokens are the first of their row or document, as booleans."""
    return pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0), value=True)


def first_key(documents_BT: Tensor, window: Tensor | None, unit: WindowUnit = "blocks") -> Tensor:
    """The first key each query sees: the later of its document's start and its window's edge.

    `window` is a 0-d integer tensor, so that to compiled code a new value is data and no constant;
    None: only documents limit what is seen.
    """
    t_T = torch.arange(documents_BT.shape[1], dtype=torch.int32, device=documents_BT.device)
    first_BT = torch.where(document_starts(documents_BT), t_T, 0)
    if window is not None and unit != "blocks":
        first_BT = torch.maximum(first_BT, t_T - window + 1)
    if window is not None and unit != "tokens":
        blocks = _whole_blocks(window, unit)
        first_BT = torch.maximum(first_BT, (t_T // BLOCK - blocks + 1) * BLOCK)
    return first_BT.to(torch.int32).cummax(1).values


def _whole_blocks(window: Tensor, unit: WindowUnit) -> Tensor:
    assert unit != "none", "a window has a unit"
    return window if unit == "blocks" else (window + BLOCK - 1) // BLOCK


def block_lists(first_BT: Tensor, *, full: bool = True) -> BlockLists:
    """Full and partial key blocks of every query block; all partial, if not `full`.

    `first` does not decrease, so within a query block the first query sees furthest back and the
    last one least far. Key blocks from the first query's `seen` on are not empty; those from the
    last query's `full` on are seen by all queries, up to the diagonal block, which is partial.
    """
    T = first_BT.shape[1]
    starts_Q = torch.arange(0, T, BLOCK, device=first_BT.device)
    block_Q = (starts_Q // BLOCK).to(torch.int32)
    seen_BQ = first_BT[:, starts_Q] // BLOCK
    last_BQ = first_BT[:, (starts_Q + BLOCK - 1).clamp(max=T - 1)]
    full_BQ = torch.minimum((last_BQ + BLOCK - 1) // BLOCK, block_Q)
    if not full:
        full_BQ = block_Q.expand_as(full_BQ)
    cut_BQ = (full_BQ - seen_BQ)[..., None]
    partial_index = torch.where(block_Q < cut_BQ, seen_BQ[..., None] + block_Q, block_Q[:, None])
    full_index = torch.minimum(full_BQ[..., None] + block_Q, block_Q[-1])
    return BlockLists(cut_BQ[..., 0] + 1, partial_index, block_Q - full_BQ, full_index)


def dense_mask(documents_BT: Tensor, window: Tensor | None, unit: WindowUnit = "blocks") -> Tensor:
    """(B, T, T) booleans, query by key: the conditions written out for every pair."""
    t_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    q, k = t_T[:, None], t_T
    allowed = (k <= q) & (documents_BT[:, :, None] == documents_BT[:, None, :])
    if window is not None and unit != "blocks":
        allowed = allowed & (q - k < window)
    if window is not None and unit != "tokens":
        allowed = allowed & (q // BLOCK - k // BLOCK < _whole_blocks(window, unit))
    return allowed
