"""The elementwise passes: nanoseconds a logit for the loss, and ReLU squared against memory speed.

Shapes are those of the nano track. Native passes, their torch twins and torch operations that move
as many bytes take turns; a figure is the median of its turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from statistics import median

import torch
from torch import Tensor

from speedrun.bench.step import nano_config
from speedrun.errors import ConfigError
from speedrun.hardware import cores
from speedrun.model import blocks, fused, native

CAP = 15.0


def measure_fused(repeats: int = 30) -> dict[str, float | int | str]:
    kernel = native.load()
    if isinstance(kernel, str):
        raise ConfigError(f"bench fused measures the native kernels, and there are none: {kernel}.")
    torch.set_num_threads(cores())
    blocks.prepare(64)  # memory is kept as it is in training
    config = nano_config("record-18")
    tokens, wide, V = config.batch.tokens, 4 * config.model.width, 2048
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(tokens, V, generator=generator)
    targets = torch.randint(V, (tokens,), generator=generator)
    x, g = (torch.randn(tokens, wide, generator=generator) for _ in range(2))
    y, leaf = x.relu().square(), logits.clone().requires_grad_()
    _, rows = fused._cross_entropy(logits, targets, CAP)
    one = torch.ones(())
    typical = medians(
        {
            "loss forward": lambda: fused._cross_entropy(logits, targets, CAP),
            "loss backward": lambda: fused._cross_entropy_backward(one, logits, targets, rows, CAP),
            "loss in torch": lambda: torch.autograd.grad(loss_in_torch(leaf, targets), leaf),
            "relu forward": lambda: fused._relu_squared(x),
            "one pass": lambda: torch.neg(x),
            "relu backward": lambda: fused._relu_squared_backward(g, y),
            "multiply": lambda: torch.mul(g, y),
        },
        repeats,
    )
    ns = {name: seconds * 1e9 / logits.numel() for name, seconds in typical.items()}
    both = ns["loss forward"] + ns["loss backward"]
    return {
        "loss_ns_per_logit": both,
        "loss_forward_ns_per_logit": ns["loss forward"],
        "loss_backward_ns_per_logit": ns["loss backward"],
        "loss_over_torch": ns["loss in torch"] / both,
        "relu_squared_forward_over_negation": typical["relu forward"] / typical["one pass"],
        "relu_squared_backward_over_multiply": typical["relu backward"] / typical["multiply"],
        "memory_gigabytes_per_second": 8 * x.numel() / typical["one pass"] / 1e9,
        "threads": torch.get_num_threads(),
        "kernels": kernel.built,
    }


def loss_in_torch(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(fused.softcap(logits, CAP), targets)


def medians(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each run, taking turns, after two turns to warm up.

    In another order each turn: what comes after a run on the same data finds it in the cache.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order, random = list(runs), Random(0)
    for _ in range(repeats + 2):
        random.shuffle(order)
        for name in order:
            begun = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - begun)
    return {name: median(taken[2:]) for name, taken in seconds.items()}
