"""What this machine can do and what this process may use of it.

Cores and memory are those of the container we run in, if there is one: threads beyond a CPU quota
are stopped for most of each period, and memory beyond a limit kills the process. The matmul peak is
measured, never assumed, and precisions are tried in a child process: on some virtual machines a
bf16 matmul does not run slowly but kills the process with SIGILL.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch takes a second to import, and preparing data does not need it
    import torch

CGROUPS = Path("/sys/fs/cgroup")
MEMORY = Path("/proc/meminfo")
PROCESS = Path("/proc/self")
_IMPORTED = time.time()


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _cgroups() -> Iterator[Path]:
    """The control group (v2) of this process and those around it; each may set a limit."""
    for line in _text(PROCESS / "cgroup").splitlines():
        if line.startswith("0::"):
            group = CGROUPS / line.removeprefix("0::").strip("/")
            yield group
            yield from (parent for parent in group.parents if parent.is_relative_to(CGROUPS))


def cores() -> int:
    """Cores this process may keep busy: those it may run on, or fewer where a quota says so."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    for group in _cgroups():
        quota, *period = _text(group / "cpu.max").split() or ["max"]
        if quota != "max":
            # Rounded down: threads that wait for each other go at the pace of one that is stopped.
            count = min(count, int(quota) // int(period[0]))
    return max(1, count)


def cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.M)
    return found[1].strip() if found else platform.processor() or platform.machine()


def memory_bytes() -> int:
    """The machine's memory, or the limit of the container."""
    limits = [limit for _, limit in _memory_limits()]
    return min([_memory()[0], *limits])


def memory_available() -> int:
    """What could still be allocated without swapping; page cache counts as free."""
    free = [_memory()[1]]
    for group, limit in _memory_limits():
        used = int(_text(group / "memory.current") or 0)
        cache = re.findall(r"^(?:in)?active_file (\d+)$", _text(group / "memory.stat"), re.M)
        free.append(max(0, limit - used + sum(map(int, cache))))
    return min(free)


def _memory() -> tuple[int, int]:
    """Bytes of the machine's memory, and of what could still be allocated."""
    lines = re.findall(r"^(MemTotal|MemAvailable):\s*(\d+) kB$", _text(MEMORY), re.M)
    found = {name: 1024 * int(kilobytes) for name, kilobytes in lines}
    if len(found) == 2:
        return found["MemTotal"], found["MemAvailable"]
    import psutil  # where Linux does not say it; not imported for nothing at each start

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _memory_limits() -> Iterator[tuple[Path, int]]:
    for group in _cgroups():
        limit = _text(group / "memory.max").strip() or "max"
        if limit != "max":
            yield group, int(limit)


def peak_memory_bytes() -> int:
    """The most memory this process has had resident.

    Not ru_maxrss where it can be helped: on Linux a child starts with the value of its parent.
    """
    if found := re.search(r"^VmHWM:\s*(\d+) kB", _text(PROCESS / "status"), re.M):
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
    fields = _text(PROCESS / "stat").rpartition(")")[2].split()
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
