"""Progress of long work: a bar for each stage in a terminal, a line for each when piped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from speedrun.terminal.console import size_text


@contextmanager
def stage_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A function to call with a stage, what is done of it, and its total."""
    console = Console(stderr=True)
    if not console.is_terminal:
        begun: set[str] = set()

        def say(stage: str, _: int, total: int) -> None:
            if stage not in begun:
                begun.add(stage)
                print(f"{stage}: {size_text(total)}" if total else stage, flush=True)

        yield say
        return
    bars: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:

        def update(stage: str, done: int, total: int) -> None:
            if stage not in bars:
                bars[stage] = progress.add_task(stage)
            progress.update(bars[stage], completed=done, total=total or None)

        yield update
