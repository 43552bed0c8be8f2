"""A live panel in a terminal, plain lines when piped."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from speedrun.terminal.console import printable
from speedrun.train.log import Display, StepView

PLAIN_EVERY = 10.0  # seconds between plain step lines: a log stays readable at any speed


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def target_text(view: StepView) -> str:
    """The target and how far the last validation was from it."""
    if not view.target:
        return ""
    if view.tokens_to_target is not None:
        return f"target {view.target:g} reached after {view.tokens_to_target:,} tokens"
    if view.val_loss is None:
        return f"target {view.target:g}"
    return f"target {view.target:g}, {view.val_loss - view.target:.2f} to go"


def _spaced(text: str) -> str:
    return f"{text}  " if text else ""


def step_line(view: StepView) -> str:
    peak = "" if view.peak_share is None else f"{view.peak_share:.0%} of peak  "
    return (
        f"step {view.step}/{view.total}  loss {view.loss:.4f}  {_spaced(target_text(view))}"
        f"lr x{view.lr_multiplier:.3f}  "
        f"{view.ms:.0f} ms  {view.tokens_per_second:,.0f} tokens/s  {peak}"
        f"waiting for data {view.wait_share:.1%}  ETA {duration(view.eta)}"
        + (f"  [{view.verdict}]" if view.verdict else "")
    )


def validation_line(view: StepView) -> str:
    bits = "" if view.val_bpb is None else f"{view.val_bpb:.4f} bits/byte  "
    return (
        f"step {view.step}/{view.total}  validation {view.val_loss:.4f} nats/token  {bits}"
        f"{_spaced(target_text(view))}"
        f"over {view.val_tokens:,} tokens, after {view.seconds:.1f} s of training"
    )


class PlainDisplay(Display):
    def __init__(self, say: Callable[[str], None] = print) -> None:
        self._say, self._last = say, 0.0

    def note(self, text: str) -> None:
        self._say(printable(text))

    def step(self, view: StepView) -> None:
        if view.step == view.total or time.monotonic() - self._last >= PLAIN_EVERY:
            self._say(step_line(view))
            self._last = time.monotonic()

    def validation(self, view: StepView) -> None:
        self._say(validation_line(view))


class LiveDisplay(Display):
    """The last step, a bar, and the validation history above it."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def note(self, text: str) -> None:
        # It may quote anything.
        self._live.console.print(printable(text), highlight=False, markup=False)

    def step(self, view: StepView) -> None:
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            ProgressBar(total=view.total, completed=view.step, width=40),
            f"{view.step}/{view.total}",
            f"ETA {duration(view.eta)}",
        )
        facts = Text.assemble(
            ("loss ", "dim"), f"{view.loss:.4f}   ",
            ("validation ", "dim"), "-" if view.val_loss is None else f"{view.val_loss:.4f}", "   ",
            (f"{target_text(view)}   ", "green" if view.tokens_to_target is not None else ""),
            f"{view.tokens_per_second:,.0f}", (" tokens/s   ", "dim"),
            "" if view.peak_share is None else f"{view.peak_share:.0%}", (" of peak   ", "dim"),
            ("waiting for data ", "dim"), f"{view.wait_share:.1%}   ", (view.verdict, "bold red"),
        )  # fmt: skip
        self._live.update(Group(bar, facts))

    def validation(self, view: StepView) -> None:
        self.note(validation_line(view))
        self.step(view)

    def close(self) -> None:
        self._live.stop()


def choose_display(console: Console) -> Display:
    if console.is_terminal:
        return LiveDisplay(console)
    return PlainDisplay(lambda text: print(text, flush=True))
