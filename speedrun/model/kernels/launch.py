"""How kernels are launched: all through `start`, with settings that `capability` may choose.

None is tuned while it runs. Triton's autotuner times every candidate at the first call of each
shape, on whatever the GPU does besides; a first step would take seconds more on one rank than on
another, and two runs of a config could compute with different kernels. The settings here are few,
written down, and each is compiled for every chip by `make integration`, which reads off that its
registers and shared memory are there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **settings: Any) -> None:
    """Launch on the device of the first argument; a grid of nothing launches nothing."""
    if 0 in grid:
        return
    first: Tensor = arguments[0]
    # Triton 3.10 will no longer fuse a product with a sum unless told to; that is said here.
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
        kernel[grid](*arguments, enable_fp_fusion=True, **settings)


def capability(x: Tensor) -> tuple[int, int]:
    """Of the GPU that x is on; of an interpreter the lowest there is."""
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)
