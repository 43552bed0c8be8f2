"""The kernel of adam.py. A program takes some neighbouring numbers through the whole formula."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adam(
    param,
    grad,
    exp_avg,  # fp32, as the next
    exp_avg_sq,
    corrections,  # (2,) fp32
    good,  # a byte, read if GUARDED
    N,
    lr,
    kept,  # of a weight, by its decay
    rate1,  # 1 - beta1
    beta2,
    rate2,
    eps,
    GUARDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if GUARDED:
        N = N * tl.load(good).to(tl.int64)  # of a step that is left out nothing is read or written
    there = at < N
    g = tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
    m = tl.load(exp_avg + at, mask=there, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=there, other=0.0)
    w = tl.load(param + at, mask=there, other=0.0).to(tl.float32)
    m += rate1 * (g - m)
    v = beta2 * v + rate2 * g * g
    denominator = tl.sqrt(v / tl.load(corrections + 1)) + eps
    w = kept * w - lr * (m / tl.load(corrections)) / denominator
    tl.store(exp_avg + at, m, mask=there)
    tl.store(exp_avg_sq + at, v, mask=there)
    tl.store(param + at, w.to(param.dtype.element_ty), mask=there)
