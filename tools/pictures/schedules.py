"""What changes over a run of record 18, as `settings_at` gives it to every step."""

from __future__ import annotations

from collections.abc import Callable

from speedrun.config.architecture import BLOCK
from speedrun.config.resolve import resolve
from speedrun.config.schedule import Settings, settings_at
from tools.pictures.svg import WIDTH, Drawing

LEFT, RIGHT = 70.0, WIDTH - 24.0
PANEL, GAP, TOP = 92.0, 58.0, 104.0


def draw() -> str:
    config = resolve("record-18", "small").config
    steps = config.steps
    values = [settings_at(config, step) for step in range(steps + 1)]
    cooldown = steps - next(i for i, at in enumerate(values) if at.learning_rate_multiplier < 1) + 1
    warmup = next(i for i, at in enumerate(values) if at.momentum == values[-1].momentum)
    widest = max(at.window or 0 for at in values)
    picture = Drawing(
        566,
        "The schedules of record 18 over its run",
        f"Three curves over {steps:,} steps: the rate stays at its peak and falls to zero over the "
        f"last {cooldown}, the momentum rises over the first {warmup}, the window grows in steps "
        f"to {widest * BLOCK:,} tokens.",
    )
    picture.heading(
        "What changes over a run: record 18", f"settings_at(config, step), {steps:,} steps"
    )

    def panel(
        row: int, words: str, under: str, colour: str, of: Callable[[Settings], float],
        low: float, high: float, ticks: dict[float, str],
    ) -> None:  # fmt: skip
        top = TOP + row * (PANEL + GAP)

        def y(value: float) -> float:
            return top + PANEL * (1 - (value - low) / (high - low))

        picture.text(LEFT, top - 12, words, bold=True, size=15)
        picture.text(RIGHT, top - 12, under, fill="soft", size=13, anchor="end")
        for tick, label in ticks.items():
            picture.line([(LEFT, y(tick)), (RIGHT, y(tick))], "grid")
            picture.text(LEFT - 9, y(tick) + 5, label, size=13, anchor="end", fill="soft")
        # Where a value stands still or moves along a line only the ends are drawn.
        points, found = list[tuple[float, float]](), [of(at) for at in values]
        for step, value in enumerate(found):
            before, after = found[max(step - 1, 0)], found[min(step + 1, steps)]
            inner = 0 < step < steps and abs((value - before) - (after - value)) < 1e-9
            if not inner:
                points.append((LEFT + (RIGHT - LEFT) * step / steps, y(value)))
        picture.line(points, colour, width=2.2)

    ends = values[0], values[-1]
    panel(0, "learning rate, of its peak", f"falls over the last {cooldown} steps", "c1",
          lambda at: at.learning_rate_multiplier, 0, 1, {0: "0", 0.5: "0.5", 1: "1"})  # fmt: skip
    first, last = (at.momentum for at in ends)
    panel(1, "Muon's momentum", f"rises over the first {warmup} steps", "c2",
          lambda at: at.momentum, first - 0.01, last + 0.01,
          {at: f"{at:g}" for at in (first, last)})  # fmt: skip
    tokens = [BLOCK * (at.window or 0) for at in ends]
    grows = f"{ends[0].window} to {ends[1].window} blocks of {BLOCK}"
    panel(2, "attention window, in tokens", grows, "c3",
          lambda at: BLOCK * (at.window or 0), 0, tokens[1],
          {0: "0", 896: "896", tokens[1]: f"{tokens[1]:,}"})  # fmt: skip
    bottom = TOP + 3 * PANEL + 2 * GAP
    for step in (0, 500, 1000, steps):
        x = LEFT + (RIGHT - LEFT) * step / steps
        picture.line([(x, bottom), (x, bottom + 5)], "soft")
        anchor = "end" if step == steps else "middle"
        picture.text(x, bottom + 23, f"{step:,}", size=13, anchor=anchor, fill="soft")
    picture.text((LEFT + RIGHT) / 2, bottom + 46, "step", size=14, anchor="middle", fill="soft")
    return picture.render()
