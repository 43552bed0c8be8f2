"""A loss curve in the terminal: braille dots, four to a row and two to a column of characters."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import pairwise

Point = tuple[float, float]
WIDTH, HEIGHT = 60, 10  # in characters
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def draw(points: Sequence[Point], line: float) -> str:
    """`points` joined by segments; `line` is a dotted level such as the target (0: none)."""
    points = [(x, y) for x, y in points if math.isfinite(y)]
    if len(points) < 2:
        return ""
    levels = [y for _, y in points] + ([line] if line else [])
    low, high = min(levels), max(levels)
    left, right = points[0][0], max(x for x, _ in points)
    columns, rows = 2 * WIDTH, 4 * HEIGHT
    cells = [[0] * WIDTH for _ in range(HEIGHT)]

    def row_of(y: float) -> int:
        return round((high - y) / (high - low or 1.0) * (rows - 1))

    def dot(column: int, row: int) -> None:
        cells[row // 4][column // 2] |= DOTS[row % 4][column % 2]

    if line:
        for column in range(0, columns, 4):
            dot(column, row_of(line))
    previous = row_of(_at(points, left))
    for column in range(columns):
        row = row_of(_at(points, left + (right - left) * column / (columns - 1)))
        for filled in range(min(previous, row), max(previous, row) + 1):
            dot(column, filled)
        previous = row
    labels = [f"{high:8.3f} ", *[" " * 9] * (HEIGHT - 2), f"{low:8.3f} "]
    lines = ("".join(map(_character, row)) for row in cells)
    return "\n".join(label + text for label, text in zip(labels, lines, strict=True))


def _character(dots: int) -> str:
    """Braille, or where the terminal has none a star for whatever is there."""
    braille = chr(0x2800 + dots)
    try:
        braille.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "*" if dots else " "
    return braille


def _at(points: Sequence[Point], x: float) -> float:
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0 or 1.0)
    return points[-1][1]
