"""What this machine can do, found out by trying.

The matmul peak is measured, never assumed, and precisions are tried in a child process: on some
virtual machines a bf16 matmul does not run slowly but kills the process with SIGILL.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

CPU = torch.device("cpu")


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_available() -> int:
    """What the machine could still give; all of it where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return memory_bytes()


def matmul_flops(
    size: int = 1024,
    repeats: int = 8,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> float:
    """Best rate of a square matmul on the current threads or device, in FLOP/s."""
    if device.type == "cuda":
        size = max(size, 8192)  # smaller ones do not fill a GPU
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    out = a @ b
    best = float("inf")
    for _ in range(repeats):
        _wait(device)
        begun = time.perf_counter()
        torch.matmul(a, b, out=out)
        _wait(device)
        best = min(best, time.perf_counter() - begun)
    return 2.0 * size**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Probe:
    """How a precision does on this CPU: its rate, or how the attempt ended."""

    flops: float | None
    failure: str = ""


def probe_bf16(timeout: float = 60.0) -> Probe:
    """Try a bf16 matmul in a child, so that an illegal instruction cannot take us down."""
    code = (
        "import torch; from speedrun.hardware import matmul_flops; "
        f"torch.set_num_threads({cores()}); print(matmul_flops(512, 3, torch.bfloat16))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return Probe(None, f"no answer within {timeout:.0f} s")
    if done.returncode < 0:
        return Probe(None, f"the process dies of signal {-done.returncode}")
    if done.returncode:
        return Probe(None, done.stderr.strip().splitlines()[-1])
    return Probe(float(done.stdout))
