"""The kernel of loss.py. A program computes one row of logits.

It reads the row twice: for its logsumexp, then to put the gradient in its place. The second time
the row comes from the L2 cache: three rows a multiprocessor are under way at a time, on an H100
40 MB of bf16 logits in a cache of 50.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """By one exponential, to 1e-7 absolutely; +-1 where that overflows or vanishes."""
    return 1 - 2 / (tl.exp(2 * x) + 1)


@triton.jit
def softcap_cross_entropy(
    logits,  # (N, V) with row_stride, becomes the gradient
    targets,  # (K, N), int64
    weights,  # (K,)
    count,  # of tokens the mean is taken over
    losses,  # (N,) fp32
    N,
    V,
    row_stride,
    cap,
    K: tl.constexpr,
    CAPPED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    z_V = logits + row.to(tl.int64) * row_stride  # there may be more than 2^31 logits
    nowhere = float("-inf")

    # The logits at the targets are read before the first loop: its sums make all threads wait for
    # each other, so none is still reading here when another overwrites them in the second loop.
    weight = 0.0
    at_targets = 0.0
    counts = False
    for k in tl.static_range(K):
        target = tl.load(targets + k * N + row)
        w = tl.load(weights + k)
        there = target >= 0
        inside = there & (target < V)
        at_target = tl.load(z_V + target, mask=inside, other=float("nan")).to(tl.float32)
        if CAPPED:
            at_target = cap * tanh(at_target / cap)
        weight += tl.where(there, w, 0.0)
        at_targets += tl.where(there, w * at_target, 0.0)
        counts = counts | there

    highest = nowhere
    total = 0.0
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(z_V + column, mask=column < V, other=0.0).to(tl.float32)
        if CAPPED:
            z = cap * tanh(z / cap)
        z = tl.where(column < V, z, nowhere)
        before = highest
        highest = tl.maximum(before, tl.max(z, 0))
        # Where all so far are -inf their difference to the highest would be NaN.
        base = tl.where(highest == nowhere, 0.0, highest)
        total = total * tl.exp(before - base) + tl.sum(tl.exp(z - base), 0)
    logsumexp = highest + tl.log(total)
    tl.store(losses + row, tl.where(counts, weight * logsumexp - at_targets, 0.0))

    if GRADIENT:
        share = 1.0 / tl.load(count).to(tl.float32)
        for start in range(0, V, BLOCK):
            column = start + tl.arange(0, BLOCK)
            z = tl.load(z_V + column, mask=column < V, other=0.0).to(tl.float32)
            slope = 1.0
            if CAPPED:
                t = tanh(z / cap)
                z = cap * t
                slope = 1 - t * t
            g = weight * tl.exp(z - logsumexp)
            for k in tl.static_range(K):
                target = tl.load(targets + k * N + row)
                g -= tl.where(column == target, tl.load(weights + k), 0.0)
            g = tl.where(counts, g * slope * share, 0.0)
            tl.store(z_V + column, g.to(logits.dtype.element_ty), mask=column < V)
