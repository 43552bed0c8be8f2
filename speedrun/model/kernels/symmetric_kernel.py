"""The kernel of symmetric.py. A program computes one tile, and stores it and its mirror image."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def symmetric(
    x,  # (N, m, n) with the strides that follow
    add,  # (N, m, m), contiguous and symmetric
    out,  # (N, m, m), contiguous
    m,
    n,
    x_matrix,
    x_row,
    x_column,
    alpha,
    beta,
    ADDS: tl.constexpr,
    WIDEN: tl.constexpr,  # in the interpreter, which cannot multiply bf16
    SIDE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    across = tl.cdiv(m, SIDE)
    i = tl.program_id(0) // across
    j = tl.program_id(0) % across
    if j > i:  # above the diagonal: somebody else's mirror image
        return
    matrix = tl.program_id(1).to(tl.int64)
    row = i * SIDE + tl.arange(0, SIDE)
    column = j * SIDE + tl.arange(0, SIDE)
    depth = tl.arange(0, DEPTH)

    x += matrix * x_matrix
    left_tile = x + row.to(tl.int64)[:, None] * x_row + depth[None, :] * x_column
    right_tile = x + column.to(tl.int64)[None, :] * x_row + depth[:, None] * x_column
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for start in range(0, n, DEPTH):
        there = start + depth < n
        left = tl.load(left_tile, mask=(row < m)[:, None] & there[None, :], other=0.0)
        right = tl.load(right_tile, mask=(column < m)[None, :] & there[:, None], other=0.0)
        if WIDEN:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision="ieee")
        left_tile += DEPTH * x_column
        right_tile += DEPTH * x_column

    total *= alpha
    there = (row < m)[:, None] & (column < m)[None, :]
    place = row.to(tl.int64)[:, None] * m + column[None, :]
    out += matrix * m * m
    if ADDS:
        total += beta * tl.load(add + matrix * m * m + place, mask=there, other=0.0).to(tl.float32)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + place, rounded, mask=there)
    if j < i:
        mirrored = column.to(tl.int64)[:, None] * m + row[None, :]
        tl.store(out + mirrored, tl.trans(rounded), mask=tl.trans(there))
