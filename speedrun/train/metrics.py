"""A line of metrics.jsonl as its readers rely on it: a kind, numbers where numbers belong.

Files are cut by crashes and edited by hand. A line that is no such record is left out, so that
whoever draws, prints or sums records meets nothing else.
"""

from __future__ import annotations

from typing import Any

from speedrun.files import finite, parse_json
from speedrun.train.summary import MOST

NUMBERS = (
    "tokens", "seconds", "wall_seconds", "loss", "bits_per_byte", "val_tokens", "ms", "grad_norm",
    "lr_multiplier", "wait_seconds", "peak_share", "peak_flops", "peak_seconds",
)  # fmt: skip
WHOLE = {"train": ("step", "tokens", "seconds", "loss"), "val": ("step", "tokens", "loss")}


def read_row(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None for what is none."""
    try:
        row = finite(parse_json(line))
    except ValueError:  # no JSON, or not even UTF-8
        return None
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        return None
    if any(name not in row for name in WHOLE.get(row["kind"], ())):
        return None
    if "step" in row and not (type(row["step"]) is int and 0 <= row["step"] < MOST):
        return None
    return row if all(_is_number(row.get(name)) for name in NUMBERS) else None


def _is_number(value: object) -> bool:
    """Or nothing: what was not finite is written as null."""
    return value is None or (type(value) in (int, float) and -MOST < value < MOST)  # type: ignore[operator]
