"""What a machine is and does, and what a process has used of it."""

import os
import subprocess
import sys
import time

import pytest

from speedrun.hardware import cpu_name, peak_memory_bytes, process_start

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED: it needs Linux's /proc")


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
