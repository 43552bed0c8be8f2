"""Block lists from documents and a window, against FlexAttention's own builder of the same mask.

`create_block_mask` asks the predicate about every pair of tokens; ours is arithmetic on one
integer per token. Both end in a BlockMask, and the two are compared before they are timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from speedrun.bench.attention import WINDOW, mixed_documents
from speedrun.model.attention import flex_mask
from speedrun.model.mask import BLOCK, block_lists, first_key


def library_mask(documents_BT: Tensor, window: Tensor) -> BlockMask:
    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001
        near = q // BLOCK - k // BLOCK < window
        return (k <= q) & (documents_BT[b, q] == documents_BT[b, k]) & near

    B, T = documents_BT.shape
    return create_block_mask(sees, B, None, T, T, device=str(documents_BT.device), BLOCK_SIZE=BLOCK)


def same_blocks(ours: BlockMask, theirs: BlockMask) -> bool:
    """Equal partial lists and equal full lists, order included, for queries and for keys."""
    names = ("kv", "full_kv", "q", "full_q")
    for name in names:
        counts = [getattr(mask, f"{name}_num_blocks") for mask in (ours, theirs)]
        indices = [getattr(mask, f"{name}_indices") for mask in (ours, theirs)]
        listed = torch.arange(indices[0].shape[-1]) < counts[0][..., None]
        if not torch.equal(*counts) or not torch.equal(*(index[listed] for index in indices)):
            return False
    return True


def _seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return median(seconds)


def measure_mask(repeats: int = 25) -> dict[str, float | int | str]:
    """Milliseconds per mask; `block_mask` keys include what from_kv_blocks adds to our lists."""
    window = torch.tensor(WINDOW, dtype=torch.int32)
    short_BT, long_BT = mixed_documents(16_384), mixed_documents(65_536)
    begun = time.perf_counter()
    theirs = library_mask(short_BT, window)
    library = time.perf_counter() - begun
    assert same_blocks(flex_mask(first_key(short_BT, window)), theirs), "masks differ"
    del theirs
    library = min(library, _seconds(lambda: library_mask(short_BT, window), 1))
    lists = _seconds(lambda: block_lists(first_key(short_BT, window)), repeats)
    long_lists = _seconds(lambda: block_lists(first_key(long_BT, window)), repeats)
    mask = _seconds(lambda: flex_mask(first_key(short_BT, window)), 5)
    long_mask = _seconds(lambda: flex_mask(first_key(long_BT, window)), 5)
    return {
        "speedup_16384": library / lists,
        "speedup_16384_block_mask": library / mask,
        "library_ms_16384": library * 1e3,
        "ms_16384": lists * 1e3,
        "ms_65536": long_lists * 1e3,
        "ms_65536_block_mask": long_mask * 1e3,
    }
