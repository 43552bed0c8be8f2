"""The optimizer track: how near each entry comes to the best on every text, a profile in dots."""

from __future__ import annotations

import math
from pathlib import Path

from speedrun.commands.ladder import read_tables
from speedrun.commands.optimizers import profile
from speedrun.science.rungs import Ladder, Verdicts
from tools.pictures.svg import WIDTH, Drawing

RESULTS = Path(__file__).parent.parent.parent / "docs" / "results"
LEFT, RIGHT, TOP, ROW = 176.0, WIDTH - 40.0, 112.0, 34.0
TICKS = (1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 4.0)


def tables() -> list[Ladder]:
    return read_tables(RESULTS)


def draw() -> str:
    return drawn(tables())


def drawn(found: list[Ladder]) -> str:
    """Each entry's steps over those of the best of the text, on a log axis."""
    rows = {name: points for name, points in profile(found).items() if points}
    most = 1.04 * max(factor for points in rows.values() for factor, _ in points)
    bottom = TOP + ROW * len(rows) - 12
    said = "; ".join(
        f"{name}: {', '.join(f'{factor:.2f}' for factor, _ in points)}"
        for name, points in rows.items()
    )
    picture = Drawing(bottom + 66, "Steps of each optimizer over those of the best", said)
    picture.heading("Optimizers: steps, as a multiple of the best's", "a dot for each text")
    for number, table in enumerate(found, 1):
        x = LEFT + 150 * (number - 1)
        picture.circle(x, 80, 5.5, f"c{number}")
        picture.text(x + 12, 85, table.track, size=13, fill="soft")

    def x_of(factor: float) -> float:
        return LEFT + (RIGHT - LEFT) * math.log(factor) / math.log(most)

    for tick in TICKS:
        if tick <= most:
            picture.line([(x_of(tick), TOP - 14), (x_of(tick), bottom)], "grid")
            picture.text(x_of(tick), bottom + 22, f"x {tick:g}", size=13, anchor="middle",
                         fill="soft")  # fmt: skip
    picture.text((LEFT + RIGHT) / 2, bottom + 46, "steps to the target over those of the best",
                 size=13, anchor="middle", fill="soft")  # fmt: skip
    for number, (name, points) in enumerate(rows.items()):
        y = TOP + ROW * number + 4
        picture.text(20, y + 5, name, bold=True)
        picture.line([(x_of(points[0][0]), y), (x_of(points[-1][0]), y)], "line", width=3)
        for colour, table in enumerate(found, 1):
            results = Verdicts(table).results
            best = min(one.crossing.mean for one in results.values() if one.crossing.mean)
            if name in results and (mean := results[name].crossing.mean):
                picture.circle(x_of(mean / best), y, 5.5, f"c{colour}")
    return picture.render()
