"""Kernels for CUDA in Triton, and whether this process computes with them.

Each stands in for a formula that is written in torch beside the call of it, and takes over where
that stands: the loss (products.head_loss), the MLP (products.add_mlp), Muon's symmetric products
(optim/orthogonalize.py) and Adam's step of a bf16 table (optim/adam.py). Triton comes with CUDA
builds of torch; it is imported where a kernel is first launched and nowhere else, so without it
everything here imports, and `choose_kernels` says in a sentence why torch's code is taken.

On a CPU nothing runs but Triton's interpreter, which is for tests: it takes some milliseconds for
what a GPU does in a microsecond. With TRITON_INTERPRET=1 in the environment a run can be told to
go through it.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Literal

import torch
from torch import Tensor

from speedrun.errors import ConfigError

Kernels = Literal["torch", "triton"]
INTERPRET = "TRITON_INTERPRET"
OLDEST = (8, 0)  # compute capability with products of bf16
INSTALL = "pip install 'speedrun[triton]'"

_device = ""  # on which kernels compute: "cuda", interpreted "cpu", or none


def choose_kernels(
    requested: str, device: torch.device, *, rehearsal: bool = False
) -> tuple[Kernels, str]:
    """What computes where there are kernels for CUDA, and why; refuses what cannot."""
    if requested == "torch":
        return "torch", "asked for"
    asked = requested == "triton"
    if device.type != "cuda":
        if asked and interpreted():
            missing = _missing()
            if not missing:
                return "triton", "asked for, in Triton's interpreter"
        elif rehearsal:
            return "torch", "a rehearsal has the formulas of a GPU's kernels, not the kernels"
        else:
            missing = f"Triton makes kernels for CUDA, and this runs on {device.type}"
    else:
        missing = _missing() or _too_old(device)
        if not missing:
            return "triton", "asked for" if asked else "chosen for cuda"
    if asked:
        raise ConfigError(
            f"machine.kernels = 'triton' cannot be used: {missing}; set machine.kernels=auto"
        )
    return "torch", missing


def use_kernels(chosen: Kernels, device: torch.device) -> None:
    """From here on, in this process, on all tensors of such a device."""
    global _device
    _device = device.type if chosen == "triton" else ""


def on(x: Tensor) -> bool:
    """Whether kernels compute on x."""
    return x.device.type == _device


def multiply(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether they multiply on the device of x in this type: bf16, and interpreted fp32 as well."""
    fp32 = dtype == torch.float32 and x.device.type == "cpu"
    return on(x) and (dtype == torch.bfloat16 or fp32)


def interpreted() -> bool:
    """Whether Triton was told to interpret kernels instead of compiling them."""
    return os.environ.get(INTERPRET) == "1"


def _missing() -> str:
    if importlib.util.find_spec("triton") is not None:
        return ""
    return f"triton is not installed ({INSTALL})"


def _too_old(device: torch.device) -> str:
    has = torch.cuda.get_device_capability(device)
    if has >= OLDEST:
        return ""
    return f"this GPU is of capability {has[0]}.{has[1]}, and the kernels need {OLDEST[0]}.0"
