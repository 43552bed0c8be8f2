"""The elementwise passes: nanoseconds a logit for the loss, and ReLU squared against memory speed.

Shapes are those of the nano track. Native passes, their torch twins and torch operations that move
as many bytes take turns; a figure is the median of its turns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speedrun.bench.step import nano_config
from speedrun.bench.timing import Figures, take_turns
from speedrun.errors import ConfigError
from speedrun.hardware import cores
from speedrun.model import fused, native
from speedrun.model.backend import prepare_backend

CAP = 15.0


def measure_fused(repeats: int = 30) -> Figures:
    kernel = native.load()
    if isinstance(kernel, str):
        raise ConfigError(f"bench fused measures the native kernels, and there are none: {kernel}.")
    torch.set_num_threads(cores())
    prepare_backend("blocks", 64)  # memory is kept as it is in training
    config = nano_config("record-18")
    tokens, wide, V = config.batch.tokens, 4 * config.model.width, 2048
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(tokens, V, generator=generator)
    targets = torch.randint(V, (tokens,), generator=generator)
    x, g = (torch.randn(tokens, wide, generator=generator) for _ in range(2))
    y, leaf = x.relu().square(), logits.clone().requires_grad_()
    _, rows = fused._cross_entropy(logits, targets, CAP)
    one = torch.ones(())
    typical = take_turns(
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
        warm_up=2,
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
