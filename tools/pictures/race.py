"""The committed race: tokens that each recipe needs, with their intervals, on a log axis."""

from __future__ import annotations

import math

from speedrun.science.committed import committed_race
from tools.pictures.svg import WIDTH, Drawing

LEFT, RIGHT, TOP, ROW = 34.0, WIDTH - 34.0, 112.0, 62.0
LEAST, MOST = 90e3, 4.6e6  # tokens at the ends of the axis
TICKS = (100e3, 200e3, 500e3, 1e6, 2e6)
WHAT = {
    "baseline": "GPT-2 as in llm.c, AdamW",
    "record-02": "rotary, RMSNorm, a trapezoid schedule",
    "record-03": "Muon",
    "record-18": "fifteen records later",
    "best": "key offset, a table of token pairs",
}


def draw() -> str:
    race = committed_race()
    rows = {name.removesuffix("-tuned"): row["tokens_to_target"]
            for name, row in race.statistics().items()}  # fmt: skip
    assert rows.keys() == WHAT.keys(), "the picture says what each recipe of the race is"
    seeds = len({entry.seed for entry in race.entries})
    bottom = TOP + ROW * len(rows) - 18
    picture = Drawing(
        bottom + 66,
        f"Tokens to a loss of {race.target} on {race.track}, by recipe",
        "; ".join(f"{name}: {million(row.mean)}" for name, row in rows.items() if row.mean),
    )
    picture.heading(
        f"The race: tokens to a loss of {race.target} on {race.track}",
        f"{seeds} seeds, each recipe's rates tuned; dot: mean, bar: 95% interval",
    )

    def x(tokens: float) -> float:
        return LEFT + (RIGHT - LEFT) * math.log(tokens / LEAST) / math.log(MOST / LEAST)

    for tick in TICKS:
        picture.line([(x(tick), TOP - 28), (x(tick), bottom)], "grid")
        picture.text(x(tick), bottom + 22, million(tick), size=13, anchor="middle", fill="soft")
    picture.text(WIDTH / 2, bottom + 46, "tokens of training, on a log scale", size=13,
                 anchor="middle", fill="soft")  # fmt: skip
    for number, (name, row) in enumerate(rows.items()):
        y = TOP + ROW * number
        # A recipe that did not reach the target would have none of them.
        assert None not in (row.mean, row.low, row.high, row.ratio), name
        mean, low, high = row.mean or 0, row.low or 0, row.high or 0
        colour = f"c{number}"
        picture.text(LEFT, y - 2, name, size=15, bold=True, fill=colour)
        picture.text(LEFT + 94, y - 2, WHAT[name], fill="soft")
        middle = y + 17
        picture.line([(LEFT, middle), (x(mean), middle)], colour, width=2.2)
        picture.line([(x(low), middle), (x(high), middle)], colour, width=7)
        picture.circle(x(mean), middle, 6.5, "card", stroke=colour, width=3)
        share = "" if number == 0 else f", {row.ratio:.2f} of baseline"
        words = f"{million(mean)}{share}"
        picture.text(x(high) + 14, middle + 5, words, bold=True)
    return picture.render()


def million(tokens: float) -> str:
    """As README's table has it, where a tick of the axis needs no second digit."""
    return f"{tokens / 1e6:g} M" if tokens in TICKS else f"{tokens / 1e6:.2f} M"
