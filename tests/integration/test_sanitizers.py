"""The kernels under the compiler's sanitizers: no access beside an array, no undefined behaviour.

Shapes, layouts and values are drawn at random (tests/fuzz/native.py), the same ones every time;
`make fuzz ARGS="kernels operators"` draws others for as long as one likes. Results are compared
with slow formulas, and between numbers of threads.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.native import CannotBuildError, in_cpp, in_python
from tests.model import builds
from tests.waiting import PATIENCE


@pytest.mark.parametrize(
    ("kind", "cpu", "level", "count"),
    [
        ("address,undefined", "native", "-O1", 2000),
        ("address,undefined", "x86-64-v3", "-O0", 300),
        ("thread", "native", "-O1", 300),
    ],
)
def test_sanitizers_find_nothing(
    kind: str, cpu: str, level: str, count: int, tmp_path: Path
) -> None:
    """On vectors of two widths, and with our own threads: OpenMP's are not known to the tools."""
    if cpu == "x86-64-v3" and not builds.runs_v3():
        pytest.skip("NOT TESTED: this CPU is not an x86-64-v3")
    try:
        program = in_cpp(kind, cpu, level, tmp_path)
    except CannotBuildError as reason:
        pytest.skip(f"NOT TESTED: the kernels with -fsanitize={kind}: {reason}")
    assert program.complaint(range(count), PATIENCE) == ""


def test_what_python_passes_is_what_is_meant(tmp_path: Path) -> None:
    """Through ctypes and torch's operators, and what does not fit is refused before C++ sees it."""
    try:
        program = in_python(tmp_path)
    except CannotBuildError as reason:
        pytest.skip(f"NOT TESTED: the operators on sanitized kernels: {reason}")
    assert program.complaint(range(300), PATIENCE) == ""
