"""The table of docs/kernels.md: `PYTHONPATH=.venv/triton python -m tools.kernels.table`."""

from __future__ import annotations

from collections.abc import Sequence

from tools.kernels.cases import CASES, H100, Case
from tools.kernels.compiled import KIB, SHARED, Compiled, compiled

RIDGE = H100.flops / H100.memory_rate  # FLOP a byte, beyond which memory waits
HEADS = ("call", "GFLOP", "GB", "FLOP/byte", "H100 at best, ms", "limit")


def table() -> str:
    work = [_work(case) for case in CASES if case.stated]
    taken = [
        _taken(case, one)
        for case in CASES
        if case.stated
        for arch in SHARED
        for one in compiled(case.call, arch)
    ]
    heads = ("call", "chip", "threads", "registers", "shared KiB", "tensor memory", "spills")
    return "\n".join([*_rows(HEADS, work), "", *_rows(heads, taken)])


def _work(case: Case) -> tuple[str, ...]:
    limit = "tensor cores" if case.tensor_cores and case.intensity > RIDGE else "memory"
    figures = (f"{case.flops / 1e9:,.1f}", f"{case.bytes / 1e9:.3f}", f"{case.intensity:.1f}")
    return case.name, *figures, f"{1e3 * case.seconds:.3f}", limit


def _taken(case: Case, one: Compiled) -> tuple[str, ...]:
    one.check()
    figures = one.threads, one.registers, f"{one.shared / KIB:.1f}", one.tensor_memory, one.spills
    return case.name, f"sm_{one.arch}", *map(str, figures)


def _rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]


if __name__ == "__main__":
    print(table())
