"""What a process may use: the machine's cores and memory, or less where somebody says so."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from speedrun import limits
from speedrun.commands import bench
from speedrun.limits import (
    asked_threads,
    core_limits,
    cores,
    idle_cores,
    machine_memory,
    memory_available,
    memory_bytes,
    memory_limits,
    threads,
)

GIB = 1 << 30
OURS = ("SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE",
        "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID")  # fmt: skip


class Machine:
    """A made-up machine of eight cores, and the files that tell of its control groups."""

    def __init__(self, root: Path) -> None:
        self.root = root / "groups"
        self.process = root / "process"
        self.root.mkdir()
        self.process.mkdir()

    def inside(self, lines: str, mounts: str = "") -> None:
        (self.process / "cgroup").write_text(lines)
        (self.process / "mountinfo").write_text(mounts.replace("ROOT", str(self.root)))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(limits, "CGROUPS", made.root)
    monkeypatch.setattr(limits, "PROCESS", made.process)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "cpu.max").write_text("100000 100000\n")  # above the root: none of ours
    return made


@pytest.fixture
def group(machine: Machine) -> Path:
    """Our group in version 2, two below the root."""
    machine.inside("4:memory:/old\n0::/jobs/mine\n")
    (machine.root / "jobs/mine").mkdir(parents=True)
    return machine.root / "jobs/mine"


@pytest.mark.parametrize(
    ("mine", "around", "expected"),
    [
        ("max 100000", "max 100000", 8),
        ("300000 100000", "max 100000", 3),
        ("max 100000", "200000 100000", 2),
        ("350000 100000", "800000 100000", 3),
        ("50000 100000", "max 100000", 1),
        ("150000 100000", "max 100000", 1),
        ("1600000 100000", "max 100000", 8),
        ("nonsense", "0 0", 8),
    ],
)
def test_cores_keep_to_the_quota(group: Path, mine: str, around: str, expected: int) -> None:
    assert cores() == 8
    assert core_limits() == []
    (group / "cpu.max").write_text(mine + "\n")
    (group.parent / "cpu.max").write_text(around + "\n")
    assert cores() == expected
    assert all("cgroup cpu.max" in limit.source for limit in core_limits())
    assert bool(core_limits()) == (expected < 8)


@pytest.mark.parametrize(
    ("quota", "around", "expected"),
    [(-1, -1, 8), (300_000, -1, 3), (-1, 250_000, 2), (50_000, 400_000, 1)],
)
def test_version_1_has_other_names(
    machine: Machine, quota: int, around: int, expected: int
) -> None:
    machine.inside("5:cpu,cpuacct:/jobs/mine\n1:name=systemd:/x\n")
    for folder, value in (("cpu,cpuacct/jobs/mine", quota), ("cpu,cpuacct/jobs", around)):
        (machine.root / folder).mkdir(parents=True, exist_ok=True)
        (machine.root / folder / "cpu.cfs_quota_us").write_text(f"{value}\n")
        (machine.root / folder / "cpu.cfs_period_us").write_text("100000\n")
    assert cores() == expected
    assert all("cpu.cfs_quota_us" in limit.source for limit in core_limits())


@pytest.mark.parametrize(
    ("path", "root"),
    [
        ("/", "/"),  # a namespace of its own
        ("/docker/abc", "/docker/abc"),  # none: the host's path, and that group mounted
        ("/docker/abc/sub", "/docker/abc"),
        ("/../../elsewhere", "/"),  # a process that was moved out of the namespace
    ],
)
def test_in_a_container_the_mount_is_our_group(machine: Machine, path: str, root: str) -> None:
    """Both versions are mounted, as they are side by side on older systems."""
    machine.inside(
        f"4:memory:{path}\n3:cpu,cpuacct:{path}\n0::{path}\n",
        f"30 25 0:26 / / rw - ext4 /dev/vda rw\n"
        f"32 31 0:29 {root} ROOT/c rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
        f"35 31 0:32 {root} ROOT/m rw,relatime - cgroup cgroup rw,memory\n"
        f"41 31 0:38 {root} ROOT/unified rw,relatime - cgroup2 cgroup2 rw\n",
    )
    for folder in ("c", "m", "unified"):
        (machine.root / folder).mkdir()
    (machine.root / "c/cpu.cfs_quota_us").write_text("200000\n")
    (machine.root / "c/cpu.cfs_period_us").write_text("100000\n")
    (machine.root / "m/memory.limit_in_bytes").write_text(f"{GIB // 4}\n")
    assert cores() == 2
    assert memory_bytes() == GIB // 4


def test_memory_keeps_to_the_limit(group: Path) -> None:
    machine = psutil.virtual_memory().total
    assert memory_bytes() == machine
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text(f"{GIB // 4}\n")
    assert memory_bytes() == GIB // 4
    assert [limit.source for limit in memory_limits()] == [
        "limit of the container (cgroup memory.max)"
    ]
    (group.parent / "memory.current").write_text(f"{GIB // 8}\n")
    (group.parent / "memory.stat").write_text("anon 5\nactive_file 3000\ninactive_file 2000\n")
    assert memory_available() == GIB // 8 + 5000
    (group / "memory.high").write_text(f"{GIB // 16}\n")
    assert memory_bytes() == GIB // 16
    (group.parent / "memory.current").write_text(f"{GIB}\n")
    assert memory_available() == 0
    for file in (group / "memory.high", group.parent / "memory.max"):
        file.write_text(f"{2 * machine}\n")
    assert memory_bytes() == machine


def test_memory_of_version_1(machine: Machine) -> None:
    machine.inside("4:memory:/mine\n", "")
    group = machine.root / "memory/mine"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # none
    (group / "memory.usage_in_bytes").write_text(f"{GIB // 8}\n")
    assert memory_limits() == []
    # The group around ours is out of sight: the kernel tells of it here alone.
    (group / "memory.stat").write_text(
        f"cache 7\ntotal_active_file 3000\nactive_file 9\ntotal_inactive_file 2000\n"
        f"hierarchical_memory_limit {GIB // 4}\n"
    )
    assert memory_bytes() == GIB // 4
    assert memory_available() == GIB // 8 + 5000


def test_no_control_group_is_no_limit(group: Path, machine: Machine) -> None:
    (group / "cpu.max").write_text("100000 100000\n")
    assert cores() == 1
    (machine.process / "cgroup").unlink()
    assert cores() == 8
    assert memory_bytes() == psutil.virtual_memory().total
    assert 0 < memory_available() <= memory_bytes()


def test_without_proc_the_kernel_and_the_mounted_group_are_asked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PROCESS", machine.root / "none")
    monkeypatch.setattr(limits, "MEMORY", machine.root / "none")
    total, free = machine_memory()
    assert 0.8 < total / psutil.virtual_memory().total < 1.2
    assert 0 < free <= total
    assert cores() == 8
    (machine.root / "cpu.max").write_text("300000 100000\n")
    (machine.root / "memory.max").write_text(f"{GIB // 4}\n")
    assert cores() == 3
    assert memory_bytes() == GIB // 4


def test_a_binding_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5}, raising=False)
    assert cores() == 3
    assert "taskset" in core_limits()[0].source
    machine.inside("0::/\n")
    (machine.root / "cpuset.cpus.effective").write_text("0-1,5\n")
    assert "cgroup cpuset" in core_limits()[0].source


def test_a_scheduler_says_it_in_variables(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cores() == 8
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "256")
    assert cores() == 4
    assert core_limits()[0].source == "SLURM_CPUS_PER_TASK=4"
    assert memory_bytes() == 256 << 20
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "0")  # all of it
    assert memory_limits() == []
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "10")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "4")
    assert memory_bytes() == 40 << 20


def test_threads_are_as_many_as_asked_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (threads(), threads(2), threads(3), threads(16)) == (8, 4, 2, 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")
    assert (threads(), threads(2), threads(4)) == (3, 3, 2)
    for nonsense in ("", "0", "-1", "all"):
        monkeypatch.setenv("OMP_NUM_THREADS", nonsense)
        assert threads() == 8
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads(2) == 1
    tail = "of 8 cores work; unset it or set machine.threads"
    assert idle_cores() == f"OMP_NUM_THREADS=1: 1 {tail}"
    assert idle_cores(3) == f"OMP_NUM_THREADS=1: 3 {tail}"
    assert idle_cores(8) == ""
    assert bench.machine()["threads"] == 1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun's own 1
    assert asked_threads() is None
    assert threads(2) == 4
    assert idle_cores() == ""


def test_address_space_is_memory_too() -> None:
    code = (
        "from speedrun.limits import *\n"
        "assert memory_bytes() == 1 << 29, memory_limits()\n"
        "assert memory_limits()[0].source == 'ulimit -v'\n"
        "assert 0 < memory_available() < 1 << 29\n"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))

    environment = {key: value for key, value in os.environ.items() if key not in OURS}
    subprocess.run([sys.executable, "-c", code], preexec_fn=limit, env=environment, check=True)
