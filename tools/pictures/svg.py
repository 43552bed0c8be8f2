"""A drawing as SVG text: the same bytes for the same data, on every machine.

One file serves light and dark: its colours are CSS variables that `prefers-color-scheme` sets, as a
browser shows an image of a page. The card behind the drawing has its own colour, so it can be read
on any page, also where a page is dark and the browser is not. It is drawn 560 units wide with
no letter below 13, which a phone shows at 8 pixels, and is shown at 640 where there is room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

WIDTH = 560
SHOWN = 640

LIGHT = {
    "card": "#ffffff", "line": "#d9d5ca", "grid": "#eceae4", "ink": "#1c2126", "soft": "#565f69",
    "pale": "#f4f2ec", "full": "#3f6fb5", "part": "#c3d5ee", "seen": "#7fa3d6", "mark": "#b3261e",
    "c0": "#5b6675", "c1": "#1f6fd6", "c2": "#c2560a", "c3": "#0b7d52", "c4": "#8748c4",
}  # fmt: skip
DARK = {
    "card": "#161a20", "line": "#39414c", "grid": "#272c35", "ink": "#e8eaed", "soft": "#a8b0ba",
    "pale": "#20252d", "full": "#5b8fdc", "part": "#263a59", "seen": "#3f689f", "mark": "#ff8a80",
    "c0": "#9aa5b4", "c1": "#6aaaff", "c2": "#ff9b4a", "c3": "#4fd09a", "c4": "#c69bff",
}  # fmt: skip
SANS = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue','DejaVu Sans',sans-serif"
MONO = "ui-monospace,'SF Mono','Cascadia Code','DejaVu Sans Mono',Menlo,Consolas,monospace"

Point = tuple[float, float]


def number(value: float) -> str:
    """To a tenth of a unit, without a tail of zeros or a minus before one."""
    return f"{round(value, 1) + 0:.1f}".removesuffix(".0")


class Drawing:
    """Shapes in the order in which they are drawn; colours are names of the palettes above."""

    def __init__(self, height: float, title: str, description: str) -> None:
        """`title` and `description` are what a screen reader says of the file."""
        self.height, self.title, self.description = height, title, description
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, *,
        stroke: str | None = None, radius: float = 0, dash: str = "",
    ) -> None:  # fmt: skip
        place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        corner = f' rx="{number(radius)}"' if radius else ""
        self._parts.append(f"<rect {place}{corner}{_paint(fill, stroke, dash)}/>")

    def circle(
        self, x: float, y: float, radius: float, fill: str, *, stroke: str | None = None,
        width: float = 1,
    ) -> None:  # fmt: skip
        place = f'cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"'
        self._parts.append(f"<circle {place}{_paint(fill, stroke, '', width)}/>")

    def line(
        self, points: Sequence[Point], stroke: str, *, width: float = 1, dash: str = ""
    ) -> None:
        path = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self._parts.append(f'<path d="{path}"{_paint("none", stroke, dash, width)}/>')

    def shape(self, outlines: Iterable[Sequence[Point]], fill: str) -> None:
        """Closed outlines as one shape."""
        path = "".join(
            "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points) + "Z"
            for points in outlines
        )
        if path:
            self._parts.append(f'<path d="{path}"{_paint(fill, None, "")}/>')

    def text(
        self, x: float, y: float, words: str, *, size: float = 14, fill: str = "ink",
        anchor: str = "start", bold: bool = False, mono: bool = False, turn: bool = False,
    ) -> None:  # fmt: skip
        """`y` is the line that the letters stand on; `turn` writes upwards."""
        styles = "".join(
            f' class="{name}"'
            for name in (" ".join(n for n, on in (("b", bold), ("m", mono)) if on),)
            if name
        )
        place = f'x="{number(x)}" y="{number(y)}" font-size="{number(size)}"'
        turned = f' transform="rotate(-90 {number(x)} {number(y)})"' if turn else ""
        at = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(
            f'<text {place}{at}{turned}{styles} fill="var(--{fill})">{escape(words, False)}</text>'
        )

    def arrow(self, x: float, y: float, length: float, *, fill: str = "soft") -> None:
        """Downwards from (x, y)."""
        tip = y + length
        self.line([(x, y), (x, tip - 6)], fill, width=1.5)
        self.shape([[(x - 5, tip - 8), (x + 5, tip - 8), (x, tip)]], fill)

    def heading(self, words: str, under: str = "") -> None:
        self.text(20, 32, words, size=18, bold=True)
        if under:
            self.text(20, 54, under, fill="soft")

    def render(self) -> str:
        def colours(palette: dict[str, str]) -> str:
            return "svg{" + "".join(f"--{name}:{value};" for name, value in palette.items()) + "}"

        size = f'width="{SHOWN}" height="{number(self.height * SHOWN / WIDTH)}"'
        box = f'viewBox="0 0 {WIDTH} {number(self.height)}"'
        card = Drawing(0, "", "")
        card.rect(0.5, 0.5, WIDTH - 1, self.height - 1, "card", stroke="line", radius=10)
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img">',
            f"<title>{escape(self.title, False)}</title>",
            f"<desc>{escape(self.description, False)}</desc>",
            "<style>",
            colours(LIGHT),
            "@media(prefers-color-scheme:dark){" + colours(DARK) + "}",
            f"text{{font-family:{SANS};font-variant-numeric:tabular-nums}}",
            f".m{{font-family:{MONO}}}.b{{font-weight:600}}",
            "</style>",
            *card._parts,
            *self._parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _paint(fill: str, stroke: str | None, dash: str, width: float = 1) -> str:
    filled = "none" if fill == "none" else f"var(--{fill})"
    drawn = f' fill="{filled}"'
    if stroke is not None:
        drawn += f' stroke="var(--{stroke})"'
        drawn += f' stroke-width="{number(width)}"' if width != 1 else ""
        drawn += f' stroke-dasharray="{dash}"' if dash else ""
    return drawn
