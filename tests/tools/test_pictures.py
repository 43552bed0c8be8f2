"""Pictures in the documents are drawn from the code and the results; here they are drawn again.

After a change that they show:  make pictures
"""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from speedrun.config.files import chain
from speedrun.config.resolve import resolve
from tests.commands.test_ladder import table
from tests.documents import PAGES, ROOT
from tools.pictures import optimizers, step, way
from tools.pictures.code import QUOTE, calls, check_order, find, wrong_quotes
from tools.pictures.make import DRAWN, FOLDER, PAGE, RECORDS, TABLE, with_tables
from tools.pictures.records import IN_ALL, IN_BEST, records, saved_since
from tools.pictures.svg import DARK, LIGHT, WIDTH, Drawing, number

SHOWN = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_what_the_code_draws_now(name: str) -> None:
    assert (FOLDER / name).read_text() == DRAWN[name](), "run `make pictures`"


def test_tables_of_the_records_are_those_of_the_csv_and_the_results() -> None:
    text = RECORDS.read_text()
    assert [found.groups() for found in TABLE.finditer(text)] == [("01", "18"), ("19", "89")]
    assert text == with_tables(text), "run `make pictures`"


def test_what_the_page_says_of_the_records_follows_from_the_csv() -> None:
    text = " ".join(RECORDS.read_text().split())
    rows, saved = records(), saved_since(18)
    assert f"there were {rows[-1].number} records" in text
    assert f"took {60 * rows[-1].minutes:.0f} seconds" in text
    total = sum(saved.values())
    assert f"Of the {total:.0f} seconds saved since record 18, {saved['systems']:.0f}" in text
    way = math.log(rows[0].minutes / rows[-1].minutes)
    parts = {row.number: math.log((row.before or row.minutes) / row.minutes) / way for row in rows}
    assert "More than a quarter of the way down" in text
    assert sum(parts[number] for number in range(3, 8)) > 0.25, "records 3 to 7"
    assert "records 2, 5 and 12, each a tenth of the whole way" in text
    largest_parts = sorted(parts, key=parts.__getitem__)[-3:]
    assert {number: round(parts[number], 1) for number in largest_parts} == {
        2: 0.1,
        5: 0.1,
        12: 0.1,
    }
    changed = [row for row in rows[18:] if row.kind == ("model",)]
    largest = max(changed, key=lambda row: (row.before or 0) - row.minutes)
    assert f"record {largest.number}, {largest.saved}" in text


def test_records_are_whole_and_agree_with_the_recipes() -> None:
    rows = records()
    assert [row.number for row in rows] == list(range(1, 90))
    assert all(a.date <= b.date for a, b in pairwise(rows))
    assert all(row.minutes < row.before for row in rows if row.before)
    for row in rows[1:18]:
        assert row.recipe is not None
        published = chain("recipe", row.recipe)[-1].notes["published_minutes"]
        assert published == row.minutes, row.recipe


def test_best_has_the_techniques_that_the_timeline_marks() -> None:
    best, before = (resolve(name, "small").config for name in ("best", "record-18"))
    for key in IN_BEST.values():
        section, _, field = key.partition(".")
        assert getattr(getattr(best, section), field) != getattr(getattr(before, section), field)
    for key in IN_ALL.values():
        assert hasattr(best.machine, key.removeprefix("machine.")), key


def test_every_picture_is_shown_with_words_for_who_cannot_see_it() -> None:
    shown: dict[Path, str] = {}
    for page in PAGES:
        for words, target in SHOWN.findall(page.read_text()):
            picture = (page.parent / target).resolve()
            assert picture.is_file(), f"{page.name} shows {target}, which is not there"
            assert len(words) > 40, f"{page.name}: what {target} shows is not said"
            shown[picture] = words
    assert shown.keys() == set(FOLDER.iterdir())


def test_readme_shows_the_race_and_the_page() -> None:
    targets = [target for _, target in SHOWN.findall((ROOT / "README.md").read_text())]
    assert targets == ["docs/pictures/race.svg", "docs/pictures/page.png"]
    assert PAGE.read_bytes().startswith(b"\x89PNG")
    assert PAGE.stat().st_size < 200_000


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_well_formed_and_has_colours_for_light_and_dark(name: str) -> None:
    text = (FOLDER / name).read_text()
    tree = ET.fromstring(text)
    assert tree.attrib["viewBox"].startswith(f"0 0 {WIDTH} ")
    assert all(float(letters) >= 13 for letters in re.findall(r'font-size="([\d.]+)"', text))
    assert set(re.findall(r"var\(--(\w+)\)", text)) <= LIGHT.keys() == DARK.keys()
    assert "prefers-color-scheme:dark" in text
    title, description = (
        tree.find(f"{{http://www.w3.org/2000/svg}}{n}") for n in ("title", "desc")
    )
    assert title is not None
    assert description is not None
    assert title.text
    assert description.text


def test_numbers_of_a_picture_have_one_form() -> None:
    assert [number(x) for x in (2.0, 0.04, -0.04, 12.26, 100)] == ["2", "0", "0", "12.3", "100"]


def test_words_of_a_picture_cannot_end_its_text() -> None:
    drawing = Drawing(10, "a < b", "c & d")
    drawing.text(0, 0, "</text><x>")
    assert "</text><x>" not in drawing.render()
    ET.fromstring(drawing.render())


def test_a_function_that_was_renamed_or_is_called_elsewhere_fails_the_picture() -> None:
    with pytest.raises(AttributeError):
        find("speedrun.train.trainer:Trainer.stride")
    with pytest.raises(AssertionError, match="does not call agree"):
        check_order(f"{step.TRAINER}.step", ("self.update", "agree"))
    step.check()


def test_calls_are_in_the_order_in_which_they_are_made() -> None:
    made = calls(f"{step.TRAINER}.step")
    assert made.index("next") < made.index("self.forward_backward") < made.index("agree")


def test_the_way_shows_the_same_tokens_in_every_place() -> None:
    shown = way.tokens()
    assert shown.ids == shown.inputs
    assert shown.targets[:-1] == shown.inputs[1:]
    assert [int.from_bytes(bytes.fromhex(pair), "little") for pair in shown.stored] == shown.ids
    assert shown.documents == [1] * 5 + [2] * 5


def test_quoted_code_is_in_the_code() -> None:
    page = (ROOT / "docs" / "read-the-code.md").read_text()
    assert wrong_quotes(page) == []
    assert len(QUOTE.findall(page)) == page.count("```py\n") > 5


def test_a_quote_that_is_not_in_the_code_is_found() -> None:
    page = "<!-- model/loss.py: Loss.training_loss -->\n```py\nreturn 0\n```\n"
    assert wrong_quotes(page)
    assert not wrong_quotes(
        page.replace("0", "head_loss(x_BTD, head_VD, targets_BT, self.softcap)")
    )


def test_functions_and_files_that_the_page_names_are_there() -> None:
    """`file.py: name` in the text, and every link to a source."""
    page = (ROOT / "docs" / "read-the-code.md").read_text()
    named = re.findall(r"\[`(\S+\.py)`\]\(\.\./speedrun/([^)]+)\)", page)
    assert len(named) > 10
    assert [file for file, place in named if file != place] == []
    functions = re.findall(r"`([a-z_]+/[a-z_]+)\.py: ([\w.]+)`", page)
    assert len(functions) > 10
    for file, function in functions:
        find(f"speedrun.{file.replace('/', '.')}:{function}")


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_words_stand_out_from_what_is_behind_them(palette: dict[str, str]) -> None:
    """Contrasts of at least 4.5, as the accessibility guidelines ask of small text."""

    def light(name: str) -> float:
        parts = [int(palette[name][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    written = {"card": ("ink", "soft", "mark", "c0", "c1", "c2", "c3", "c4"),
               "pale": ("ink", "soft"), "part": ("ink",), "c1": ("card",)}  # fmt: skip
    for behind, words in written.items():
        for name in words:
            darker, lighter = sorted((light(behind), light(name)))
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, f"{name} on {behind}"


def test_the_picture_of_the_optimizers_has_a_dot_for_each_text_and_seed() -> None:
    made = [table(adamw=400.0, muon=300.0), table("optimizer-prose", adamw=400.0, muon=420.0)]
    drawing = optimizers.drawn(made)
    ET.fromstring(drawing)
    assert drawing.count("<circle") == 2 + 2 * 2 * 5
    assert "adamw: 1.00 to 1.3" in drawing
