"""What this machine can do, by trying; what of it we may use is in limits.py.

The matmul peak is measured, never assumed, and precisions are tried in a child process: on some
virtual machines a bf16 matmul does not run slowly but kills the process with SIGILL.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from speedrun.limits import PROCESS, text_of, threads
from speedrun.processes import same_code

if TYPE_CHECKING:  # torch takes a second to import, and preparing data does not need it
    import torch

_IMPORTED = time.time()


def cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", text_of(Path("/proc/cpuinfo")), re.M)
    return found[1].strip() if found else platform.processor() or platform.machine()


def peak_memory_bytes() -> int:
    """The most memory this process has had resident.

    Not ru_maxrss where it can be helped: on Linux a child starts with the value of its parent.
    """
    if found := re.search(r"^VmHWM:\s*(\d+) kB", text_of(PROCESS / "status"), re.M):
        return 1024 * int(found[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def process_start() -> float:
    """When this process began, in seconds since the epoch.

    On Linux by the clock that the kernel stamps processes with. psutil goes by /proc/stat and
    others by /proc/uptime, which in some containers (lxcfs) speak of the container's start instead.
    """
    if sys.platform != "linux":
        import psutil

        return float(psutil.Process().create_time())
    fields = text_of(PROCESS / "stat").rpartition(")")[2].split()
    if not fields:
        return _IMPORTED
    ticks = int(fields[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def matmul_flops(
    size: int = 1024,
    repeats: int = 8,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> float:
    """Best rate of a square matmul on the current threads or device, in FLOP/s.

    The first one also pays for fresh memory, so that it is not the best.
    """
    import torch

    gpu = device is not None and device.type == "cuda"
    if gpu:
        size = max(size, 8192)  # smaller ones do not fill a GPU

    def now() -> float:
        if gpu:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    a, b, out = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(3))
    best = float("inf")
    for _ in range(repeats):
        begun = now()
        torch.matmul(a, b, out=out)
        best = min(best, now() - begun)
    return 2.0 * size**3 / best


@dataclass(frozen=True)
class Probe:
    """How a precision does on this CPU: its rate, or how the attempt ended."""

    flops: float | None
    failure: str = ""


def probe_bf16(timeout: float = 60.0) -> Probe:
    """Try a bf16 matmul in a child, so that an illegal instruction cannot take us down."""
    code = (
        "import torch; from speedrun.hardware import matmul_flops; "
        f"torch.set_num_threads({threads()}); print(matmul_flops(512, 3, torch.bfloat16))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, **same_code()},
        )
    except subprocess.TimeoutExpired:
        return Probe(None, f"no answer within {timeout:.0f} s")
    if done.returncode < 0:
        return Probe(None, f"the process dies of signal {-done.returncode}")
    if done.returncode:
        return Probe(None, done.stderr.strip().splitlines()[-1])
    return Probe(float(done.stdout))
