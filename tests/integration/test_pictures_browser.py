"""The pictures of the documents in a real browser, and the page's picture made from a real race."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import pytest

from tests.conftest import TINY
from tests.report.browser import Browser
from tools.pictures import screenshot
from tools.pictures.make import DRAWN, FOLDER
from tools.pictures.svg import DARK, LIGHT, WIDTH

BOXES = """[...document.querySelectorAll("text")].map((one) => {
  const box = one.getBBox();
  const turned = one.hasAttribute("transform");
  const [x, y] = [Number(one.getAttribute("x")), Number(one.getAttribute("y"))];
  return turned ? [one.textContent, x - box.height, y - box.width / 2, x, y + box.width / 2]
    : [one.textContent, box.x, box.y, box.x + box.width, box.y + box.height];
})"""


@pytest.mark.parametrize("name", DRAWN)
def test_words_of_a_picture_do_not_meet_and_stay_inside(browser: Browser, name: str) -> None:
    """In whatever font this machine has; a box is a little higher than its letters."""
    browser.open((FOLDER / name).as_uri())
    boxes = browser.js(BOXES)
    height = browser.js("document.documentElement.viewBox.baseVal.height")
    assert len(boxes) > 10
    for index, (words, left, top, right, bottom) in enumerate(boxes):
        assert 8 < left < right < WIDTH - 8, words
        assert 8 < top < bottom < height - 4, words
        for others, from_left, from_top, from_right, from_bottom in boxes[:index]:
            apart = left >= from_right or from_left >= right
            above = top + 3 >= from_bottom or from_top + 3 >= bottom
            assert apart or above, f"{words!r} lies over {others!r}"


@pytest.mark.parametrize(("dark", "palette"), [(False, LIGHT), (True, DARK)])
def test_an_image_of_a_page_has_the_colours_of_the_reader(
    browser: Browser, tmp_path: Path, dark: bool, palette: dict[str, str]
) -> None:
    page = tmp_path / "page.html"
    picture = (FOLDER / "race.svg").as_uri()
    page.write_text(
        '<meta name="viewport" content="width=device-width"><body style="margin:0">'
        f'<img src="{picture}" style="max-width:100%">'
    )
    browser.open(page.as_uri(), width=390, dark=dark)
    size = browser.js("[document.images[0].naturalWidth, document.images[0].clientWidth]")
    assert size[0] > size[1] == 390, "as wide as a phone, and no wider"
    clip = {"x": 8, "y": 40, "width": 1, "height": 1, "scale": 1}
    taken = browser.call("Page.captureScreenshot", format="png", clip=clip)["data"]
    assert first_pixel(base64.b64decode(taken)) == palette["card"]


def test_the_picture_of_the_page_is_made_from_a_race(
    tmp_path: Path, tiny_dataset: Path, browser: Browser
) -> None:
    """The very function that README's is made by, with a race of seconds."""
    assert browser is not None, "the fixture skips this where there is no Chromium"
    settings = [word for one in (*TINY, "train.target=5.0") for word in ("--set", one)]
    out = tmp_path / "page.png"
    race = (
        "modern",
        "modern-cosine",
        "--seeds",
        "1",
        "--set",
        f"data.dir={tiny_dataset}",
        *settings,
    )
    assert screenshot.make(out, race) == str(out)
    data = out.read_bytes()
    assert struct.unpack(">II", data[16:24]) == screenshot.SIZE
    assert len(data) > 20_000, "a page with nothing on it takes less"


def test_without_chromium_the_picture_is_left_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screenshot, "CHROMIUM", None)
    kept = tmp_path / "page.png"
    kept.write_bytes(b"as it was")
    assert "needs Chromium" in screenshot.make(kept)
    assert kept.read_bytes() == b"as it was"


def first_pixel(png: bytes) -> str:
    """The colour of a picture in RGB or RGBA, whose rows begin with a filter that is none here."""
    data, place = b"", 8
    while place < len(png):  # chunks: length, kind, data, checksum
        [length] = struct.unpack(">I", png[place : place + 4])
        if png[place + 4 : place + 8] == b"IDAT":
            data += png[place + 8 : place + 8 + length]
        place += 12 + length
    return "#" + zlib.decompress(data)[1:4].hex()
