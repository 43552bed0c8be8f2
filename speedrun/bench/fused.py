"""The head with its loss against the matrix products in it, and ReLU squared against memory speed.

Shapes are those of the nano track. Native routines, their torch twins and torch operations that do
the same products or move as many bytes take turns; a figure is the median of its turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speedrun.bench.step import nano_config
from speedrun.bench.timing import Figures, take_turns
from speedrun.errors import ConfigError
from speedrun.limits import threads
from speedrun.model import fused, native, products
from speedrun.model.backend import prepare_backend

CAP = 15.0


def measure_fused(repeats: int = 30, tokens: int | None = None) -> Figures:
    kernel = native.load()
    if isinstance(kernel, str):
        raise ConfigError(
            f"bench fused measures the native kernels, and there are none ({kernel}): install a "
            "C++ compiler"
        )
    torch.set_num_threads(threads())
    prepare_backend("blocks", 64)  # memory is kept as it is in training
    config = nano_config("record-18")
    N, D, V = tokens or config.batch.tokens, config.model.width, 2048
    generator = torch.Generator().manual_seed(0)
    x_ND, head_VD = (torch.randn(size, D, generator=generator) for size in (N, V))
    head_VD *= 4 / D**0.5  # logits of the size that training makes
    targets_N = torch.randint(V, (N,), generator=generator)
    logits_NV, dx_ND, dhead_VD = torch.empty(N, V), torch.empty(N, D), torch.empty(V, D)
    slopes_NV = torch.randn(N, V, generator=generator)
    leaves = [part.clone().requires_grad_() for part in (x_ND, head_VD)]
    wide, g = (torch.randn(N, 4 * D, generator=generator) for _ in range(2))
    squared = wide.relu().square()

    def native_products() -> None:
        products._linear(x_ND, head_VD)
        products._linear_backward(slopes_NV, x_ND, head_VD)

    def torch_products() -> None:
        torch.mm(x_ND, head_VD.mT, out=logits_NV)
        torch.mm(slopes_NV, head_VD, out=dx_ND)
        torch.mm(slopes_NV.mT, x_ND, out=dhead_VD)

    typical = take_turns(
        {
            "loss": lambda: products._head_loss(x_ND, head_VD, targets_N, CAP, True),
            "loss in torch": lambda: torch.autograd.grad(loss_in_torch(leaves, targets_N), leaves),
            "native products": native_products,
            "torch products": torch_products,
            "relu forward": lambda: fused._relu_squared(wide),
            "one pass": lambda: torch.neg(wide),
            "relu backward": lambda: fused._relu_squared_backward(g, squared),
            "multiply": lambda: torch.mul(g, squared),
        },
        repeats,
        warm_up=2,
    )
    best = min(typical["native products"], typical["torch products"])
    return {
        "loss_times_products": typical["loss"] / best,
        "loss_over_torch": typical["loss in torch"] / typical["loss"],
        "loss_ms": 1e3 * typical["loss"],
        "native_products_ms": 1e3 * typical["native products"],
        "torch_products_ms": 1e3 * typical["torch products"],
        "relu_squared_forward_over_negation": typical["relu forward"] / typical["one pass"],
        "relu_squared_backward_over_multiply": typical["relu backward"] / typical["multiply"],
        "memory_gigabytes_per_second": 8 * wide.numel() / typical["one pass"] / 1e9,
        "threads": torch.get_num_threads(),
        "kernels": kernel.built,
    }


def loss_in_torch(leaves: Sequence[Tensor], targets_N: Tensor) -> Tensor:
    x_ND, head_VD = leaves
    logits_NV = fused.softcap(x_ND @ head_VD.mT, CAP)
    return torch.nn.functional.cross_entropy(logits_NV, targets_N)
