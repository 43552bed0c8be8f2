"""What the kernels are launched for: the calls of record 18 at full size, and what each is of work.

A rank's step has 65,536 tokens, 768 channels and 50,304 logits. Each call goes through the function
that the model calls, so what is compiled for it is what a GPU would be given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from speedrun.model.kernels import adam, loss, mlp, symmetric
from speedrun.plan.chips import CHIPS
from tools.kernels.compiled import empty

N, D, V = 65_536, 768, 50_304
F = 4 * D
BF16 = 2  # bytes
FP32, INT64 = torch.float32, torch.int64
H100 = CHIPS["h100"]


@dataclass(frozen=True)
class Case:
    name: str
    call: Callable[[], object]
    flops: float  # of all its launches
    bytes: float  # read and written, each once
    tensor_cores: bool  # whether they do the work; else the floating-point units
    stated: bool = True  # in the table; others are variants that are compiled and no more

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    @property
    def seconds(self) -> float:
        """The least that an H100 takes: as long as its memory, or its tensor cores, need."""
        memory = self.bytes / H100.memory_rate
        return max(memory, self.flops / H100.flops if self.tensor_cores else 0.0)


def _loss(
    *, tokens: int = N, vocab: int = V, K: int = 1, cap: float = 15.0, gradient: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[], object]:  # fmt: skip
    def call() -> object:
        logits_NV = loss.rows(empty(0, dtype=dtype), tokens, vocab)
        ids_KN, weights_K = empty(K, tokens, dtype=INT64), empty(K, dtype=FP32)
        count = empty(dtype=INT64)
        return loss.losses_in_place(logits_NV, ids_KN, weights_K, cap, count, gradient)

    return call


def _hidden(tokens: int = N, width: int = D, hidden: int = F) -> Callable[[], object]:
    return lambda: mlp.hidden(empty(tokens, width), empty(hidden, width))


def _hidden_gradient(tokens: int = N, width: int = D, hidden: int = F) -> Callable[[], object]:
    return lambda: mlp.hidden_gradient(
        empty(tokens, width), empty(width, hidden), empty(tokens, hidden)
    )


def _adam(rows: int, width: int) -> Callable[[], object]:
    def call() -> object:
        weight, grad = empty(rows, width), empty(rows, width)
        mean, square = empty(rows, width, dtype=FP32), empty(rows, width, dtype=FP32)
        good, corrections = empty(dtype=torch.bool), empty(2, dtype=FP32)
        adam.adam_step(
            weight, grad, mean, square, corrections, lr=0.3, betas=(0.8, 0.95), eps=1e-10,
            weight_decay=0.0, good=good,
        )  # fmt: skip
        return weight

    return call


ADAM_BYTES = 3 * BF16 + 4 * 4  # weight, gradient and moments read, all but the gradient written
MLP_BYTES = BF16 * (N * D + D * F + N * F)  # each operand once, and the result


def _symmetric(
    count: int, m: int, n: int, *, turned: bool = False, adds: bool = False
) -> Callable[[], object]:
    def call() -> None:
        x = empty(count, n, m).mT if turned else empty(count, m, n)
        add = empty(count, m, m) if adds else None
        symmetric.symmetric_product(x, empty(count, m, m), alpha=2.0, add_Nmm=add, beta=0.5)

    return call


# Of Muon's matrices of 768 x 3072, two for each of 12 layers: half of all products, to the tile.
COUNT = 2 * 12
SQUARE = BF16 * COUNT * D * D
HALF = (D // 128 + 1) / (D // 128)

# Of a logit in the kernel, by its source: both loops with a cap, both without, the first alone.
CAPPED, PLAIN, LOOKED_AT = 26, 14, 14
CASES = [
    Case("loss and gradient", _loss(), CAPPED * N * V, 2 * BF16 * N * V, False),
    Case("loss and gradient, no cap", _loss(cap=0.0), PLAIN * N * V, 2 * BF16 * N * V, False),
    Case("loss alone", _loss(gradient=False), LOOKED_AT * N * V, BF16 * N * V, False),
    Case("loss of fp32 logits", _loss(dtype=FP32), CAPPED * N * V, 8 * N * V, False, stated=False),
    Case("loss, 3 targets", _loss(K=3), 32 * N * V, 2 * BF16 * N * V, False, stated=False),
    Case("loss, odd sizes", _loss(tokens=65_537, vocab=50_257), 0, 1, False, stated=False),
    Case("loss, one token", _loss(tokens=1), 0, 1, False, stated=False),
    Case("MLP, up", _hidden(), 2 * N * D * F, MLP_BYTES, True),
    Case("MLP, gradient", _hidden_gradient(), 2 * N * D * F, MLP_BYTES + BF16 * N * F, True),
    Case("MLP, up, odd sizes", _hidden(65_537, 771, 3085), 0, 1, True, stated=False),
    Case("MLP, gradient, odd", _hidden_gradient(65_537, 771, 3085), 0, 1, True, stated=False),
    Case("MLP, one token", _hidden(tokens=1), 0, 1, True, stated=False),
    Case("Adam of a bf16 table", _adam(V, D), 14 * V * D, ADAM_BYTES * V * D, False),
    Case("Adam, odd sizes", _adam(241, 97), 0, 1, False, stated=False),
    Case("Muon, X X^T", _symmetric(COUNT, D, F), HALF * COUNT * D * D * F,
         BF16 * COUNT * D * F + SQUARE, True),
    Case("Muon, b A + c A^2", _symmetric(COUNT, D, D, adds=True), HALF * COUNT * D * D * D,
         2 * SQUARE, True),
    Case("Muon, X in columns", _symmetric(COUNT, D, F, turned=True), 0, 1, True, stated=False),
    Case("Muon, odd sizes", _symmetric(3, 771, 3085, adds=True), 0, 1, True, stated=False),
    Case("MLP, odd tokens", _hidden_gradient(tokens=65_537), 0, 1, True, stated=False),
]  # fmt: skip
