"""Block lists from documents and a window, against FlexAttention's own builder of the same mask.

`create_block_mask` asks the predicate about every pair of tokens; ours is arithmetic on one
integer per token. Both end in a BlockMask, and the two are compared before they are timed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from speedrun.bench.attention import WINDOW, mixed_documents
from speedrun.bench.timing import Figures, take_turns
from speedrun.config.architecture import BLOCK
from speedrun.model.mask import block_lists, first_key
from speedrun.model.plan import flex_mask


def library_mask(documents_BT: Tensor, window: Tensor) -> BlockMask:
    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001
        near = q // BLOCK - k // BLOCK < window
        return (k <= q) & (documents_BT[b, q] == documents_BT[b, k]) & near

    B, T = documents_BT.shape
    return create_block_mask(sees, B, None, T, T, device=str(documents_BT.device), BLOCK_SIZE=BLOCK)


def same_blocks(ours: BlockMask, theirs: BlockMask) -> bool:
    """Equal partial lists and equal full lists, order included, for queries and for keys."""
    for name in ("kv", "full_kv", "q", "full_q"):
        counts = [getattr(mask, f"{name}_num_blocks") for mask in (ours, theirs)]
        indices = [getattr(mask, f"{name}_indices") for mask in (ours, theirs)]
        listed = torch.arange(indices[0].shape[-1]) < counts[0][..., None]
        if not torch.equal(*counts) or not torch.equal(*(index[listed] for index in indices)):
            return False
    return True


def measure_mask(turns: int = 3, lengths: tuple[int, int] = (16_384, 65_536)) -> Figures:
    """Milliseconds per mask; `block_mask` keys include what from_kv_blocks adds to our lists."""
    window = torch.tensor(WINDOW, dtype=torch.int32)
    short, long = lengths
    short_BT, long_BT = mixed_documents(short), mixed_documents(long)
    ours, theirs = flex_mask(first_key(short_BT, window)), library_mask(short_BT, window)
    assert same_blocks(ours, theirs), "masks differ"
    seconds = take_turns(
        {
            "library": lambda: library_mask(short_BT, window),
            "lists": lambda: block_lists(first_key(short_BT, window)),
            "long lists": lambda: block_lists(first_key(long_BT, window)),
            "mask": lambda: flex_mask(first_key(short_BT, window)),
            "long mask": lambda: flex_mask(first_key(long_BT, window)),
        },
        turns,
        times_per_turn={"lists": 8, "long lists": 8, "mask": 2, "long mask": 2},
    )
    return {
        f"speedup_{short}": seconds["library"] / seconds["lists"],
        f"speedup_{short}_block_mask": seconds["library"] / seconds["mask"],
        f"library_ms_{short}": seconds["library"] * 1e3,
        f"ms_{short}": seconds["lists"] * 1e3,
        f"ms_{long}": seconds["long lists"] * 1e3,
        f"ms_{long}_block_mask": seconds["long mask"] * 1e3,
    }
