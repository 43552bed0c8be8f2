"""Which keys a query may see, from documents and a window: ranges, block lists, a dense mask.

A query sees itself and what precedes it in its own document, back to the edge of its window.
That is one unbroken run of keys, `first .. query`, and `first` never moves back along a row.
So one integer per token says everything (`first_key`), and the lists of full and partial
128-token blocks that FlexAttention wants are arithmetic on it (`block_lists`): no T x T tensor,
no sort. `dense_mask` states the same rules pair by pair, for tests and tiny inputs.

Legend: B rows, T tokens, Q query blocks, KV key blocks.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128

# What the window counts, w being its value:
#   blocks           q // 128 - k // 128 < w
#   tokens           q - k < w
#   tokens_in_blocks q - k < w  and  q // 128 - k // 128 < ceil(w / 128)
WindowRule = Literal["blocks", "tokens", "tokens_in_blocks"]


class BlockLists(NamedTuple):
    """Per query block, how many key blocks need a mask (partial) or none (full), and which.

    Counts are (B, Q), indices (B, Q, KV); of an index row the first `count` entries count.
    """

    partial_count: Tensor
    partial_index: Tensor
    full_count: Tensor
    full_index: Tensor


def document_ids(tokens_BT: Tensor, end_of_text: int | None) -> Tensor:
    """Number every token's document, counted anew in each row; end-of-text opens a document.

    Without an end-of-text token a row is one document: plain causal attention.
    """
    if end_of_text is None:
        return torch.zeros_like(tokens_BT, dtype=torch.int32)
    return (tokens_BT == end_of_text).cumsum(1, dtype=torch.int32)


def first_key(documents_BT: Tensor, window: Tensor | None, rule: WindowRule = "blocks") -> Tensor:
    """The first key each query sees: the later of its document's start and its window's edge.

    `window` is a 0-d integer tensor, so that a compiled caller sees new data and no new constant;
    None leaves documents alone to limit the view.
    """
    t_T = torch.arange(documents_BT.shape[1], dtype=torch.int32, device=documents_BT.device)
    opens_BT = pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0), value=True)
    first_BT = torch.where(opens_BT, t_T, 0)
    if window is not None and rule != "blocks":
        first_BT = torch.maximum(first_BT, t_T - window + 1)
    if window is not None and rule != "tokens":
        blocks = window if rule == "blocks" else (window + BLOCK - 1) // BLOCK
        first_BT = torch.maximum(first_BT, (t_T // BLOCK - blocks + 1) * BLOCK)
    return first_BT.to(torch.int32).cummax(1).values


def block_lists(first_BT: Tensor) -> BlockLists:
    """Full and partial key blocks of every query block.

    The first query of block Q sees furthest back, its last query least far: from `seen` on no
    block is empty, from `full` on (up to Q, itself cut by the diagonal) none is cut.
    """
    T = first_BT.shape[1]
    starts_Q = torch.arange(0, T, BLOCK, device=first_BT.device)
    block_Q = (starts_Q // BLOCK).to(torch.int32)
    seen_BQ = first_BT[:, starts_Q] // BLOCK
    last_BQ = first_BT[:, (starts_Q + BLOCK - 1).clamp(max=T - 1)]
    full_BQ = torch.minimum((last_BQ + BLOCK - 1) // BLOCK, block_Q)
    cut_BQ = (full_BQ - seen_BQ)[..., None]
    partial_index = torch.where(block_Q < cut_BQ, seen_BQ[..., None] + block_Q, block_Q[:, None])
    full_index = torch.minimum(full_BQ[..., None] + block_Q, block_Q[-1])
    return BlockLists(cut_BQ[..., 0] + 1, partial_index, block_Q - full_BQ, full_index)


def dense_mask(documents_BT: Tensor, window: Tensor | None, rule: WindowRule = "blocks") -> Tensor:
    """(B, T, T) booleans, query by key: the rules as they are said, at their full cost."""
    t_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    q, k = t_T[:, None], t_T
    allowed = (k <= q) & (documents_BT[:, :, None] == documents_BT[:, None, :])
    if window is not None and rule != "blocks":
        allowed = allowed & (q - k < window)
    if window is not None and rule != "tokens":
        blocks = window if rule == "blocks" else (window + BLOCK - 1) // BLOCK
        allowed = allowed & (q // BLOCK - k // BLOCK < blocks)
    return allowed
