"""The records of the public race, docs/records.csv: a timeline, and the tables of its page."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from speedrun.config.files import names
from speedrun.science.committed import COMMITTED
from speedrun.science.results import Ablation, Race, read_result
from tools.pictures.svg import WIDTH, Drawing

DOCS = Path(__file__).parent.parent.parent / "docs"
KINDS = {"model": "c1", "optimizer": "c2", "training": "c3", "systems": "c0"}
# Records after 18 of which `best` has a technique, and the key that is its switch; those of the
# machine are in every recipe.
IN_ALL = {24: "machine.share_gradients", 59: "machine.kernels", 60: "machine.kernels"}
IN_BEST = {20: "model.attention_scale", 49: "model.key_offset", 62: "model.bigram_rows"}


@dataclass(frozen=True)
class Record:
    number: int
    date: date
    minutes: float
    before: float | None  # minutes of the record before it, by the clock of its own day
    kind: tuple[str, ...]  # the main one first
    what: str

    @property
    def recipe(self) -> str | None:
        """The recipe here that states it."""
        name = "baseline" if self.number == 1 else f"record-{self.number:02d}"
        if name in names("recipe"):
            return name
        return "best" if self.number in IN_BEST else None

    @property
    def saved(self) -> str:
        if self.before is None:
            return ""
        seconds = 60 * (self.before - self.minutes)
        return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"


def records() -> list[Record]:
    found: list[Record] = []
    with (DOCS / "records.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            before = float(row["before"]) if row["before"] else None
            if before is None and found:
                before = found[-1].minutes
            kind = tuple(row["kind"].split("+"))
            assert all(one in KINDS for one in kind), f"record {row['number']} is of {row['kind']}"
            day, minutes = date.fromisoformat(row["date"]), float(row["minutes"])
            found.append(Record(int(row["number"]), day, minutes, before, kind, row["what"]))
    return found


# The timeline.

LEFT, RIGHT, TOP, BOTTOM = 48.0, WIDTH - 24.0, 104.0, 468.0
FROM, TO = date(2024, 5, 1), date(2026, 9, 1)
LEAST, MOST = 1.0, 60.0
# Which are named, in two or three words, and where: right or left of the mark, and how far above.
NAMED = {
    1: ("GPT-2 in llm.c", "right", 13), 2: ("rotary, RMSNorm", "right", 13),
    3: ("Muon", "left", -3), 5: ("ReLU squared, QK-norm", "right", 5),
    9: ("shortcuts, softcap", "right", 5), 12: ("long rows, windows", "right", 6),
    14: ("value tables", "left", -6),
    18: ("softcap 15", "right", 10), 20: ("sharper attention", "left", -18),
    49: ("key offset", "right", 12), 62: ("token pairs", "right", 12),
}  # fmt: skip


def draw() -> str:
    rows = records()
    picture = Drawing(
        552,
        f"The public race, records 1 to {rows[-1].number}",
        f"Minutes to a validation loss of 3.28 on FineWeb with 8 H100, on a log scale over time: "
        f"{rows[0].minutes:g} in {rows[0].date:%B %Y}, {rows[17].minutes:g} with record 18 in "
        f"{rows[17].date:%B %Y}, {rows[-1].minutes:g} in {rows[-1].date:%B %Y}. Records 1 to 18 "
        "are recipes here; best has techniques of three later ones.",
    )
    picture.heading(
        f"The public race: records 1 to {rows[-1].number}",
        "minutes to a loss of 3.28 on FineWeb, 8 x H100, log scale",
    )

    def x(day: date) -> float:
        return LEFT + (RIGHT - LEFT) * (day - FROM).days / (TO - FROM).days

    def y(minutes: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * math.log(minutes / LEAST) / math.log(MOST / LEAST)

    for tick in (1, 2, 5, 10, 20, 45):
        picture.line([(LEFT, y(tick)), (RIGHT, y(tick))], "grid")
        picture.text(LEFT - 8, y(tick) + 5, f"{tick}", size=13, anchor="end", fill="soft")
    for year, month in ((2024, 7), (2025, 1), (2025, 7), (2026, 1), (2026, 7)):
        at = x(date(year, month, 1))
        picture.line([(at, BOTTOM), (at, BOTTOM + 5)], "soft")
        picture.text(at, BOTTOM + 22, f"{date(year, month, 1):%b} {year}", size=13, anchor="middle",
                     fill="soft")  # fmt: skip
    # A record stands until the next one.
    steps = [(x(rows[0].date), y(rows[0].minutes))]
    for row in rows[1:]:
        steps += [(x(row.date), steps[-1][1]), (x(row.date), y(row.minutes))]
    picture.line([*steps, (RIGHT, steps[-1][1])], "line", width=1.5)
    for row in sorted(rows, key=lambda row: row.recipe is not None):
        place, colour = (x(row.date), y(row.minutes)), KINDS[row.kind[0]]
        if row.recipe is None:
            picture.circle(*place, 2.6, colour)
        elif row.recipe == "best":
            picture.circle(*place, 5, "card", stroke=colour, width=2.5)
        else:
            picture.circle(*place, 5, colour, stroke="card")
    for row in rows:
        if row.number not in NAMED:
            continue
        words, side, above = NAMED[row.number]
        away = 10 if side == "right" else -10
        text = f"{row.number} {words}".strip()
        anchor = "start" if side == "right" else "end"
        picture.text(x(row.date) + away, y(row.minutes) + 5 - above, text, size=13, anchor=anchor)
    last = rows[-1]
    words = f"{last.number}: {last.minutes:g}"
    picture.text(RIGHT, y(last.minutes) - 12, words, size=13, bold=True, anchor="end")
    _legend(picture, 88)
    return picture.render()


def _legend(picture: Drawing, y: float) -> None:
    left = 20.0
    for kind, colour in KINDS.items():
        picture.circle(left + 5, y - 5, 5, colour)
        picture.text(left + 15, y, kind, size=13)
        left += 15 + 8 * len(kind) + 22
    low = BOTTOM + 58
    picture.circle(25, low - 5, 5, "soft")
    picture.text(35, low, "a recipe here", size=13)
    picture.circle(165, low - 5, 5, "card", stroke="soft", width=2.5)
    picture.text(176, low, "a technique of it in best", size=13)
    picture.circle(375, low - 5, 2.6, "soft")
    picture.text(383, low, "not here", size=13)


# The tables.

# What was measured here of a record: switches of the ablations of `best`, recipes of races.
SWITCHES = {
    3: ("Muon",), 5: ("ReLU squared", "zero-initialised projections", "QK-norm"),
    8: ("untied head",), 9: ("x0 mixing",), 12: ("document mask", "window"),
    14: ("value embeddings",), 15: ("pair of value weights",), 49: ("key offset",),
    62: ("bigram table",),
}  # fmt: skip
TRACKS = {"code": "ablation-best.json", "prose": "ablation-best-prose.json"}
RACES = {
    2: (COMMITTED, "record-02-tuned"), 3: (COMMITTED, "record-03-tuned"),
    16: (DOCS / "results" / "race-15-16-18.json", "record-16"),
    18: (DOCS / "results" / "race-15-16-18.json", "record-18"),
}  # fmt: skip


def measured(number: int) -> str:
    """What our own runs found of a record, from the committed results."""
    found = []
    if number in RACES:
        path, recipe = RACES[number]
        race = read_result(path)
        assert isinstance(race, Race)
        row, other = race.to_the_one_before()[recipe], race.order[race.order.index(recipe) - 1]
        assert row.ratio is not None, f"{recipe} reached the target of {path.name}"
        found.append(
            f"{row.ratio:.2f} [{row.ratio_low:.2f}, {row.ratio_high:.2f}] of the tokens of "
            f"`{other.removesuffix('-tuned')}`"
        )
    for switch in SWITCHES.get(number, ()):
        effects = []
        for text, name in TRACKS.items():
            ablation = read_result(DOCS / "results" / name)
            assert isinstance(ablation, Ablation)
            for effect in ablation.effects:
                if effect.switch == switch and effect.metric == "val_loss":
                    assert effect.effect is not None
                    effects.append(f"{effect.effect:+.4f} on {text}, {effect.verdict}")
        assert effects, f"no ablation has the switch {switch}"
        found.append(f"{switch}: {'; '.join(effects)}")
    return "<br>".join(found)


def table(first: int, last: int) -> str:
    lines = ["| # | date | minutes | saved | kind | what changed | recipe | here |",
             "|--:|---|--:|--:|---|---|---|---|"]  # fmt: skip
    for row in records():
        if first <= row.number <= last:
            recipe = f"`{row.recipe}`" if row.recipe else ""
            if row.number in IN_BEST:
                recipe += f": `{IN_BEST[row.number]}`"
            if row.number in IN_ALL:
                recipe = f"all: `{IN_ALL[row.number]}`"
            kind = ", ".join(row.kind)
            when, minutes = f"{row.date:%d %b %Y}".replace(" ", "&nbsp;"), f"{row.minutes:g}"
            cells = (row.number, when, minutes, row.saved, kind, row.what, recipe,
                     measured(row.number))  # fmt: skip
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def saved_since(number: int) -> dict[str, float]:
    """Seconds by kind since a record; of one of several kinds each has an equal share."""
    seconds = dict.fromkeys(KINDS, 0.0)
    for row in records()[number:]:
        for kind in row.kind:
            seconds[kind] += 60 * ((row.before or row.minutes) - row.minutes) / len(row.kind)
    return seconds
