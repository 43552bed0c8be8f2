"""The kernels under the compiler's sanitizers: no access beside an array, no undefined behaviour.

Shapes are drawn at random by a small program (sanitize.cpp), the same ones every time.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from speedrun.model.native.build import HERE
from tests.model import builds
from tests.waiting import PATIENCE

SOURCE = Path(__file__).with_name("sanitize.cpp")
DRAWS, SEED = 12, 1
EMPTY = "int main() { return 0; }\n"


def flags(kind: str, cpu: str) -> list[str]:
    return ["-O0", "-g", "-std=c++17", "-ffp-contract=fast", "-pthread", f"-march={cpu}",
            f"-fsanitize={kind}", "-fno-sanitize-recover=all", f"-I{HERE}"]  # fmt: skip


@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
@pytest.mark.parametrize("cpu", ["x86-64-v3", "native"])
def test_sanitizers_find_nothing(kind: str, cpu: str, tmp_path: Path) -> None:
    """On vectors of two widths, and with our own threads: OpenMP's are not known to the tools."""
    builds.needs("g++")
    if cpu == "x86-64-v3" and not builds.runs_v3():
        pytest.skip("NOT TESTED: this CPU is not an x86-64-v3")
    empty = tmp_path / "empty.cpp"
    empty.write_text(EMPTY)
    made = run("g++", *flags(kind, cpu), str(empty), "-o", str(tmp_path / "empty"))
    if made.returncode or run(str(tmp_path / "empty")).returncode:
        pytest.skip(f"NOT TESTED: the kernels with -fsanitize={kind}: {made.stderr[:300]}")
    program = tmp_path / "kernels"
    made = run("g++", *flags(kind, cpu), str(SOURCE), "-o", str(program))
    assert made.returncode == 0, made.stderr
    done = run(str(program), str(DRAWS), str(SEED))
    assert done.returncode == 0, done.stderr[:5000]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run(
        words, capture_output=True, text=True, timeout=PATIENCE, env=environment, check=False
    )
