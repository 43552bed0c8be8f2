"""How much of the machine this process may use, and who says so.

Threads beyond a CPU quota are stopped for most of each period, and memory beyond a limit kills the
process. Limits are set by control groups (version 1, version 2, or both side by side), by ulimit,
by a binding to some cores, and by schedulers that say it in variables. A group's limits hold for
all groups below it, and in a container the files may be mounted at any of them; so every group from
ours up to the mount is asked, and the smallest counts.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
MEMORY = Path("/proc/meminfo")
PROCESS = Path("/proc/self")
WITHOUT = 1 << 60  # bytes; version 1 of control groups says "no limit" by a huge number


class Limit(NamedTuple):
    amount: float  # cores or bytes
    source: str  # who sets it, in words by which it can be found


class MemoryLimit(NamedTuple):
    amount: int
    free: int  # of it, with page cache counted as free
    source: str
    each: bool = False  # for each process, not for all of them together

    def __str__(self) -> str:
        return f"{self.amount / 2**30:.3g} GiB ({self.source})"

    def share(self, processes: int) -> MemoryLimit:
        """Of one of so many."""
        if self.each or processes == 1:
            return self
        source = f"a share of {processes}: {self.source}"
        return MemoryLimit(self.amount // processes, self.free // processes, source)


def text_of(file: Path) -> str:
    """What the file says; nothing where it cannot be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,20}", text.strip()) else None


# Control groups


def _mounts() -> list[tuple[str, set[str], str, Path]]:
    """Mounted groups: version, controllers, the group that is mounted, and where it is."""
    found = []
    for line in text_of(PROCESS / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        place, kind = before.split(), after.split()
        if len(place) > 4 and len(kind) > 2 and kind[0] in ("cgroup", "cgroup2"):
            found.append((kind[0], set(kind[2].split(",")), place[3], Path(place[4])))
    return found


def _groups(controller: str) -> Iterator[Path]:
    """The groups of this process and those around them that may limit `controller`."""
    mounts = _mounts()
    # Without /proc the mounted group is most likely our own.
    lines = text_of(PROCESS / "cgroup").splitlines() or ["0::/", f"1:{controller}:/"]
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        controllers = set(names.split(",")) - {""}
        if controllers and controller not in controllers:
            continue
        kind = "cgroup" if controllers else "cgroup2"
        places = [
            (root, point)
            for version, has, root, point in mounts
            if version == kind and (not controllers or controller in has)
        ]
        usual = [CGROUPS / names, CGROUPS / controller] if controllers else [CGROUPS]
        for root, point in places or [("/", place) for place in usual]:
            inside = path if root == "/" else path.removeprefix(root)
            parts = [part for part in inside.split("/") if part not in ("", ".", "..")]
            for depth in range(len(parts), -1, -1):
                yield point.joinpath(*parts[:depth])


def _quotas() -> Iterator[Limit]:
    for group in _groups("cpu"):
        words = text_of(group / "cpu.max").split()
        if len(words) == 2 and (quota := _number(words[0])) and (period := _number(words[1])):
            yield Limit(quota / period, "CPU quota of the container (cgroup cpu.max)")
        quota = _number(text_of(group / "cpu.cfs_quota_us"))  # -1: none
        period = _number(text_of(group / "cpu.cfs_period_us"))
        if quota and period:
            yield Limit(quota / period, "CPU quota of the container (cgroup cpu.cfs_quota_us)")


def _cpuset() -> int | None:
    """Cores of our cpuset, where one is set."""
    for group in _groups("cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            if ranges := re.findall(r"(\d+)(?:-(\d+))?", text_of(group / name)):
                return sum(int(last or first) - int(first) + 1 for first, last in ranges)
    return None


# Cores


def machine_cores() -> int:
    return os.cpu_count() or 1


def core_limits() -> list[Limit]:
    """Whatever allows this process fewer cores than the machine has."""
    limits = list(_quotas())
    if hasattr(os, "sched_getaffinity"):
        bound = len(os.sched_getaffinity(0))
        source = "the process is bound to them (taskset, or a scheduler)"
        if _cpuset() == bound:
            source = "cpuset of the container (cgroup cpuset.cpus)"
        limits.append(Limit(bound, source))
    if asked := _number(os.environ.get("SLURM_CPUS_PER_TASK", "")):
        limits.append(Limit(asked, f"SLURM_CPUS_PER_TASK={asked}"))
    return [limit for limit in limits if limit.amount < machine_cores()]


def cores() -> int:
    """Cores this process may keep busy."""
    # Rounded down: threads that wait for each other go at the pace of one that is stopped.
    return max(1, int(min([machine_cores(), *(limit.amount for limit in core_limits())])))


def asked_threads() -> int | None:
    """The user's OMP_NUM_THREADS, if there is one.

    torchrun sets it to 1 for its ranks where nobody did, so there a 1 is nobody's wish.
    """
    asked = _number(os.environ.get("OMP_NUM_THREADS", "").partition(",")[0])
    if asked == 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    return asked or None


def threads(processes: int = 1) -> int:
    """Threads for each of so many processes that share the cores."""
    return max(1, min(cores() // processes, asked_threads() or sys.maxsize))


def idle_cores(processes: int = 1) -> str:
    """What to say where OMP_NUM_THREADS lets fewer cores work than there are; else nothing."""
    asked = asked_threads()
    if asked is None or asked >= cores() // processes:
        return ""
    busy = processes * asked
    return (
        f"OMP_NUM_THREADS={asked}: {busy} of {cores()} cores work; unset it or set machine.threads"
    )


# Memory


def machine_memory() -> tuple[int, int]:
    """Bytes of the machine's memory, and of what could still be allocated."""
    lines = re.findall(r"^(MemTotal|MemAvailable):\s*(\d+) kB$", text_of(MEMORY), re.M)
    found = {name: 1024 * int(kilobytes) for name, kilobytes in lines}
    if len(found) == 2:
        return found["MemTotal"], found["MemAvailable"]
    if sys.platform == "linux":  # without /proc the kernel is asked, who counts no page cache
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    import psutil  # not imported for nothing at each start

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def memory_shares(processes: int = 1) -> list[MemoryLimit]:
    """What each of so many processes on this machine may have; the least first.

    Whatever they share is divided among them; a limit of each process is its own.
    """
    whole = MemoryLimit(*machine_memory(), "all that this machine has")
    shares = [limit.share(processes) for limit in (whole, *memory_limits())]
    return sorted(shares, key=lambda limit: limit.amount)


def memory_limits() -> list[MemoryLimit]:
    """Whatever allows this process less memory than the machine has."""
    machine = machine_memory()[0]
    found = [*_group_memory(), *_ulimits(), *_slurm_memory()]
    return [limit for limit in found if limit.amount < machine]


def _group_memory() -> Iterator[MemoryLimit]:
    for group in _groups("memory"):
        stat = text_of(group / "memory.stat")
        facts = {name: int(count) for name, count in re.findall(r"^(\w+) (\d+)$", stat, re.M)}
        names = ("memory.max", "memory.high", "memory.limit_in_bytes")
        limits = {name: _number(text_of(group / name)) for name in names}
        limits["hierarchical_memory_limit"] = facts.get("hierarchical_memory_limit")
        used = _number(text_of(group / "memory.current"))
        if used is None:
            used = _number(text_of(group / "memory.usage_in_bytes")) or 0
        # Version 1 counts a group's own pages and, as total_..., those of the groups below too.
        cache = sum(
            facts.get(f"total_{name}", facts.get(name, 0))
            for name in ("active_file", "inactive_file")
        )
        for name, limit in limits.items():
            if limit is not None and limit < WITHOUT:
                free = max(0, limit - used + cache)
                yield MemoryLimit(limit, free, f"limit of the container (cgroup {name})")


def _ulimits() -> Iterator[MemoryLimit]:
    kinds = {"v": (resource.RLIMIT_AS, "VmSize"), "d": (resource.RLIMIT_DATA, "VmData")}
    status = text_of(PROCESS / "status")
    for letter, (kind, name) in kinds.items():
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            found = re.search(rf"^{name}:\s*(\d+) kB", status, re.M)
            used = 1024 * int(found[1]) if found else 0
            yield MemoryLimit(limit, max(0, limit - used), f"ulimit -{letter}", each=True)


def _slurm_memory() -> Iterator[MemoryLimit]:
    """In MiB; 0 is all of it."""
    of_node, of_core, node_cores = (
        _number(os.environ.get(name, "")) or 0
        for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE")
    )
    free = machine_memory()[1]
    for name, size in (("NODE", of_node), ("CPU", of_core * node_cores)):
        if size:
            yield MemoryLimit(size << 20, min(free, size << 20), f"SLURM_MEM_PER_{name}")


def memory_bytes() -> int:
    """The machine's memory, or what the smallest limit leaves of it."""
    return memory_shares()[0].amount


def memory_available() -> int:
    """What could still be allocated without swapping; page cache counts as free."""
    return min([machine_memory()[1], *(limit.free for limit in memory_limits())])
