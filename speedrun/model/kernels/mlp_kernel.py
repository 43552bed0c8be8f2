"""The kernel of mlp.py. A program computes one tile of a product, and what comes of its sums."""

from __future__ import annotations

import triton
import triton.language as tl

BAND = tl.constexpr(8)  # tiles


@triton.jit
def product(
    a,  # (M, K), contiguous
    b,  # (N, K) with b_row, b_depth
    h,  # (M, N), contiguous; read in the backward alone
    out,  # (M, N), contiguous
    M,
    N,
    K,
    b_row,
    b_depth,
    BACKWARD: tl.constexpr,
    WIDEN: tl.constexpr,  # in the interpreter, which cannot multiply bf16
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # Programs that run at the same time are to read the same rows of a and b, so tiles go column by
    # column through a band of a few rows of tiles, then through the next band.
    across = tl.cdiv(N, COLUMNS)
    band = tl.program_id(0) // (BAND * across)
    place = tl.program_id(0) % (BAND * across)
    height = tl.minimum(tl.cdiv(M, ROWS) - band * BAND, BAND)
    row = (band * BAND + place % height) * ROWS + tl.arange(0, ROWS)
    column = (place // height) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)

    a_tile = a + row.to(tl.int64)[:, None] * K + depth[None, :]
    b_tile = b + column.to(tl.int64)[None, :] * b_row + depth[:, None] * b_depth
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, DEPTH):
        there = start + depth < K
        left = tl.load(a_tile, mask=(row < M)[:, None] & there[None, :], other=0.0)
        right = tl.load(b_tile, mask=(column < N)[None, :] & there[:, None], other=0.0)
        if WIDEN:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision="ieee")
        a_tile += DEPTH
        b_tile += DEPTH * b_depth

    place_in_out = row.to(tl.int64)[:, None] * N + column[None, :]
    there = (row < M)[:, None] & (column < N)[None, :]
    if BACKWARD:
        hidden = tl.load(h + place_in_out, mask=there, other=0.0).to(tl.float32)
        total *= 2 * tl.sqrt(hidden)
    else:
        # Not by a maximum, which need not keep a NaN.
        total = tl.where(total < 0, 0.0, total)
        total *= total
    tl.store(out + place_in_out, total.to(out.dtype.element_ty), mask=there)
