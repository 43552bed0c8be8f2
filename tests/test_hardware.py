"""What a process may use: the machine's cores and memory, or less where a container says so."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from speedrun import hardware
from speedrun.hardware import (
    cores,
    cpu_name,
    memory_available,
    memory_bytes,
    peak_memory_bytes,
    process_start,
)

GIB = 1 << 30
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED: it needs Linux's /proc")


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up control group of this process, two below the root, on a machine of eight cores."""
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(hardware, "PROCESS", tmp_path / "process")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "process").mkdir()
    (tmp_path / "process/cgroup").write_text("4:memory:/old\n0::/jobs/mine\n")
    (tmp_path / "groups/jobs/mine").mkdir(parents=True)
    (tmp_path / "cpu.max").write_text("100000 100000\n")  # above the root: none of ours
    return tmp_path / "groups/jobs/mine"


@pytest.mark.parametrize(
    ("mine", "around", "expected"),
    [
        ("max 100000", "max 100000", 8),
        ("300000 100000", "max 100000", 3),
        ("max 100000", "200000 100000", 2),
        ("350000 100000", "800000 100000", 3),
        ("50000 100000", "max 100000", 1),
        ("1600000 100000", "max 100000", 8),
    ],
)
def test_cores_keep_to_the_quota(group: Path, mine: str, around: str, expected: int) -> None:
    assert cores() == 8
    (group / "cpu.max").write_text(mine + "\n")
    (group.parent / "cpu.max").write_text(around + "\n")
    assert cores() == expected


def test_memory_keeps_to_the_limit(group: Path) -> None:
    machine = psutil.virtual_memory().total
    assert memory_bytes() == machine
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text(f"{GIB // 4}\n")
    assert memory_bytes() == GIB // 4
    (group.parent / "memory.current").write_text(f"{GIB // 8}\n")
    (group.parent / "memory.stat").write_text("anon 5\nactive_file 3000\ninactive_file 2000\n")
    assert memory_available() == GIB // 8 + 5000
    (group.parent / "memory.current").write_text(f"{GIB}\n")
    assert memory_available() == 0
    (group.parent / "memory.max").write_text(f"{2 * machine}\n")
    assert memory_bytes() == machine


def test_no_control_group_is_no_limit(group: Path, tmp_path: Path) -> None:
    (group / "cpu.max").write_text("100000 100000\n")
    assert cores() == 1
    (tmp_path / "process/cgroup").unlink()
    assert cores() == 8
    assert memory_bytes() == psutil.virtual_memory().total
    assert 0 < memory_available() <= memory_bytes()


def test_the_cpu_has_a_name() -> None:
    assert cpu_name()
    assert "\n" not in cpu_name()


@ON_LINUX
def test_peak_memory_is_our_own_and_not_our_parents() -> None:
    ballast = bytearray(200 << 20)
    ballast[::4096] = b"x" * len(ballast[::4096])
    assert peak_memory_bytes() >= 200 << 20
    code = "from speedrun.hardware import peak_memory_bytes; print(peak_memory_bytes())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1 << 20 < int(child.stdout) < 150 << 20


@ON_LINUX
def test_a_process_knows_when_it_began() -> None:
    code = (
        "import time; time.sleep(0.5); from speedrun.hardware import process_start as p; print(p())"
    )
    before = time.time()
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = time.time()
    tick = 2 / os.sysconf("SC_CLK_TCK")
    assert before - tick <= float(child.stdout) <= after - 0.5 + tick
    assert process_start() == pytest.approx(process_start(), abs=tick)


def test_preparing_data_imports_no_torch() -> None:
    code = "import sys, speedrun.data.build, speedrun.hardware; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
