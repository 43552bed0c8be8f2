"""The optimizer track: how near each entry comes to the best of every text and seed, in dots."""

from __future__ import annotations

import math
from pathlib import Path

from speedrun.commands.ladder import read_tables
from speedrun.commands.optimizers import cases, profile
from speedrun.science.rungs import Ladder, Verdicts
from tools.pictures.svg import WIDTH, Drawing

RESULTS = Path(__file__).parent.parent.parent / "docs" / "results"
LEFT, RIGHT, TOP, ROW = 200.0, WIDTH - 40.0, 112.0, 34.0
LABEL = 48.0  # of an axis takes so much room
TICKS = (1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0, 3.0, 4.0)


def tables() -> list[Ladder]:
    return read_tables(RESULTS)


def draw() -> str:
    return drawn(tables())


def drawn(found: list[Ladder]) -> str:
    """Each entry's steps over those of the best of the case, on a log axis."""
    verdicts = [*map(Verdicts, found)]
    rows = {name: points for name, points in profile(verdicts).items() if points}
    most = 1.04 * max(factor for points in rows.values() for factor, _ in points)
    bottom = TOP + ROW * len(rows) - 12
    said = "; ".join(
        f"{name}: {points[0][0]:.2f} to {points[-1][0]:.2f}" for name, points in rows.items()
    )
    picture = Drawing(bottom + 66, "Steps of each optimizer over those of the best", said)
    picture.heading(
        "Optimizers: steps, as a multiple of the best's", "a dot for each text and seed"
    )
    colours = {table.track: number for number, table in enumerate(found, 1)}
    for track, number in colours.items():
        x = LEFT + 150 * (number - 1)
        picture.circle(x, 80, 5.5, f"c{number}")
        picture.text(x + 12, 85, track, size=13, fill="soft")

    def x_of(factor: float) -> float:
        return LEFT + (RIGHT - LEFT) * math.log(factor) / math.log(most)

    written = -math.inf
    for tick in TICKS:
        x = x_of(tick)
        if tick <= most and x >= written + LABEL:
            picture.line([(x, TOP - 14), (x, bottom)], "grid")
            picture.text(x, bottom + 22, f"x {tick:g}", size=13, anchor="middle", fill="soft")
            written = x
    picture.text((LEFT + RIGHT) / 2, bottom + 46, "steps to the target over those of the best",
                 size=13, anchor="middle", fill="soft")  # fmt: skip
    for number, (name, points) in enumerate(rows.items()):
        y = TOP + ROW * number + 4
        picture.text(20, y + 5, name, bold=True)
        picture.line([(x_of(points[0][0]), y), (x_of(points[-1][0]), y)], "line", width=3)
        for track, steps in cases(verdicts):
            if name in steps:
                x = x_of(steps[name] / min(steps.values()))
                picture.circle(x, y + (6 if colours[track] > 1 else -6), 4.5, f"c{colours[track]}")
    return picture.render()
