"""What the table of the optimizer track says, as texts: for the terminal and for the document."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from speedrun.science.compare import Row
from speedrun.science.rule import Z
from speedrun.science.rungs import Ladder, Result, Rung, Verdicts, lengths_of
from speedrun.science.spread import pooled
from speedrun.terminal.console import size_text


def state_text(rung: Rung) -> str:
    return "-" if rung.state_bytes is None else size_text(rung.state_bytes)


def memory_text(rung: Rung) -> str:
    """The most that a run alone on the machine had."""
    sizes = [run.peak_memory_bytes for run in rung.timed if run.peak_memory_bytes]
    return size_text(max(sizes)) if sizes else "-"


def rule_text(table: Ladder) -> str:
    """The rule with the track's own spread."""
    return f"(target - mean) x sqrt({len(table.seeds)}) >= {Z:.2f} x {table.sigma:g}"


def own_spread(found: Verdicts, name: str) -> str:
    """Of one row, between the seeds of a length."""
    spread = pooled(lengths_of(found.searches[name]).values())
    return f"{spread.value:.4f}" if spread else "-"


def crossing_text(row: Row) -> str:
    if row.mean is None:
        return f"found for {row.n} of {row.of}"
    interval = "" if row.low is None else f" [{row.low:,.0f}, {row.high:,.0f}]"
    return f"{row.mean:,.0f}{interval}"


def ratio_text(row: Row) -> str:
    if row.ratio is None:
        return "-"
    interval = "" if row.ratio_low is None else f" [{row.ratio_low:.2f}, {row.ratio_high:.2f}]"
    return f"{row.ratio:.2f}{interval}"


def seconds_text(rung: Rung, result: Result) -> str:
    """Of runs of the length that the table states, each alone on the machine."""
    seconds = [run.seconds for run in rung.timed if run.steps == result.steps]
    if not seconds:
        return "-"
    spread = f" [{min(seconds):.1f} to {max(seconds):.1f}]" if len(seconds) > 1 else ""
    return f"{fmean(seconds):.1f}{spread}"


def beaten(result: Result, numbers: Mapping[str, int]) -> str:
    """Numbers of the rows that are decided to need more steps, runs of them as 3-6."""
    left = sorted(numbers[name] for name in result.fewer_than)
    parts: list[list[int]] = []
    for number in left:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
