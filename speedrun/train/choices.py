"""What depends on the machine: device and precision, each with the reason the log prints."""

from __future__ import annotations

import torch

from speedrun.errors import ConfigError
from speedrun.hardware import matmul_flops, memory_bytes, probe_bf16


def choose_device(requested: str) -> torch.device:
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "train.device = 'cuda' cannot be used: torch sees no CUDA device here; "
            "set train.device=cpu"
        )
    cuda = requested != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if cuda else "cpu")


def device_memory(device: torch.device) -> int:
    """All the memory that ranks on this host share on a CPU, or one rank's GPU has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return memory_bytes()


def choose_precision(requested: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype of activations and tables, and why; refuses what this machine does badly."""
    if device.type == "cuda":
        if requested == "fp32":
            return torch.float32, "asked for"
        return torch.bfloat16, "bf16 activations and tables, fp32 master weights"
    if requested != "bf16":
        return torch.float32, "what every CPU does well"
    probe, fp32 = probe_bf16(), matmul_flops()
    if probe.flops is None:
        raise ConfigError(
            f"train.precision = 'bf16' cannot be used on this CPU: in a bf16 matmul "
            f"{probe.failure}; set train.precision=fp32"
        )
    if probe.flops < fp32:
        raise ConfigError(
            f"train.precision = 'bf16' cannot be used on this CPU: its matmul reaches "
            f"{probe.flops / 1e9:.1f} GFLOP/s against {fp32 / 1e9:.0f} in fp32; "
            "set train.precision=fp32"
        )
    return torch.bfloat16, f"asked for; {probe.flops / fp32:.1f} times fp32 here"
