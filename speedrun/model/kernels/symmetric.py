"""X X^T on a GPU, of which only half is computed: the tiles on and below the diagonal, mirrored.

Both products of Muon's polynomial that are squares have this form: A = X X^T, and A^2 = A A^T,
since A is symmetric, which b A + c A^2 takes along. No gradient goes through either, and no
compiler sees them, so they are launched as they are and registered as nothing.

Shapes: N matrices of m rows and n columns.
"""

from __future__ import annotations

from torch import Tensor

from speedrun.model.kernels import launch

# Side and depth of a tile, warps, and tiles that are on their way to shared memory.
Tiles = tuple[int, int, int, int]
TILES: dict[int, Tiles] = {8: (128, 32, 8, 4), 9: (128, 64, 8, 3)}  # from that capability on
SMALL: Tiles = (32, 32, 4, 2)  # where rows do not all begin at 16 bytes; and interpreted


def symmetric_product(
    x_Nmn: Tensor,
    out_Nmm: Tensor,
    *,
    alpha: float = 1.0,
    add_Nmm: Tensor | None = None,
    beta: float = 0.0,
) -> None:
    """out = alpha X X^T + beta add, with a symmetric `add`; X lies in rows or in columns."""
    from speedrun.model.kernels.symmetric_kernel import symmetric

    N, m, n = x_Nmn.shape
    assert out_Nmm.is_contiguous()
    assert add_Nmm is None or add_Nmm.is_contiguous()
    side, depth, warps, stages = tiles(launch.capability(x_Nmn)[0], m, n)
    across = -(-m // side)
    launch.start(
        symmetric, (across * across, N), x_Nmn, add_Nmm, out_Nmm, m, n, *x_Nmn.stride(),
        float(alpha), float(beta), ADDS=add_Nmm is not None, WIDEN=x_Nmn.device.type == "cpu",
        SIDE=side, DEPTH=depth, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def tiles(major: int, m: int, n: int) -> Tiles:
    """For matrices of that shape on a chip of that major capability."""
    whole = m % 16 == 0 and n % 16 == 0
    return TILES[min(major, max(TILES))] if major and whole else SMALL
