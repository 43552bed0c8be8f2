"""What a run shows of a step: plain lines, and the panel in a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from speedrun.terminal.display import LiveDisplay, step_line, target_text, validation_line
from speedrun.train.log import StepView


def view(**changes: Any) -> StepView:
    facts: dict[str, Any] = {
        "step": 20, "total": 160, "loss": 4.5, "lr_multiplier": 0.75, "seconds": 10.0, "ms": 512.0,
        "tokens_per_second": 16000.0, "peak_share": 0.41, "wait_share": 0.002, "eta": 71.0,
        "val_loss": None, "val_bpb": None, "val_tokens": 65536, "target": 4.3,
        "tokens_to_target": None, "verdict": "",
    }  # fmt: skip
    return StepView(**facts | changes)


def test_the_step_line_says_all_there_is_to_know() -> None:
    line = step_line(view())
    for words in (
        "step 20/160", "loss 4.5000", "lr x0.750", "512 ms", "16,000 tokens/s", "41% of peak",
        "waiting for data 0.2%", "ETA 1:11",
    ):  # fmt: skip
        assert words in line
    assert step_line(view(verdict="data-bound")).endswith("[data-bound]")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "target 4.3"),
        ({"val_loss": 4.711}, "target 4.3, 0.41 to go"),
        ({"val_loss": 4.1, "tokens_to_target": 245_760}, "target 4.3 reached after 245,760 tokens"),
        ({"val_loss": 4.1, "target": 0.0}, ""),
    ],
)
def test_every_line_says_how_far_the_target_is(changes: dict[str, Any], words: str) -> None:
    seen = view(**changes)
    assert target_text(seen) == words
    lines = [step_line(seen)] if seen.val_loss is None else [step_line(seen), validation_line(seen)]
    for line in lines:
        assert f"  {words}  " in line if words else "target" not in line
    written = io.StringIO()
    live = LiveDisplay(Console(file=written, force_terminal=True, width=200))
    live.step(seen)
    live.close()
    assert words in written.getvalue()


def test_a_note_is_shown_as_it_is_whatever_it_quotes() -> None:
    """An error's brackets are no markup, which would be swallowed, or refused."""
    written = io.StringIO()
    live = LiveDisplay(Console(file=written, force_terminal=True, width=200))
    live.note("wandb cannot be written: [Errno 28] [bold]no[/] [/room]; going on")
    live.close()
    assert "written: [Errno 28] [bold]no[/] [/room]; going on" in written.getvalue()
