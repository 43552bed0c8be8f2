"""The page in a real browser: headless Chromium through its debugging pipe, the network off."""

from __future__ import annotations

import base64
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from speedrun.config.resolve import resolve
from speedrun.report.page import build_page
from speedrun.report.page.watch import Server, Source
from speedrun.science.results import Ablation, Race
from speedrun.train.run import RunFolder
from tests.report.browser import Browser
from tests.report.made import made_config
from tests.report.made import made_run as plain_run


def made_run(path: Path, recipe: str, seed: int, slope: float) -> RunFolder:
    config = made_config(
        "train.target=4.4", f"train.seed={seed}", "optimizer.kind=muon", "batch.length=2048",
        "attention.documents=true", "attention.window=blocks", "attention.window_start=128",
        "attention.window_end=1024", recipe=recipe,
    )  # fmt: skip
    run = plain_run(path, config, slope=slope, every=4)
    run.log("nonfinite", step=20)
    return run


def ablation(recipe: str, effects: list[dict[str, Any]]) -> Ablation:
    return Ablation.model_validate({"recipe": recipe, "effects": effects})


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("page")
    runs = [
        made_run(root / f"{recipe}-{seed}", recipe, seed, slope)
        for recipe, slope in (("baseline", 0.08), ("record-18", 0.12))
        for seed in range(2)
    ]
    effects = [
        {"switch": f"model.switch_{i}=false", "metric": metric, "effect": 0.02 * i - 0.01,
         "low": 0.02 * i - 0.03, "high": 0.02 * i + 0.01, "p": 0.5 / (i + 1) ** 4,
         "p_holm": min(1.0, 2 / (i + 1) ** 4), "n": 5, "more_seeds": 4}
        for i in range(5) for metric in ("val_loss", "tokens_to_target")
    ]  # fmt: skip
    out = root / "page.html"
    out.write_text(build_page(runs, None, ablation("record-18", effects)))
    return out.as_uri()


def ticks(browser: Browser, box: str) -> list[str]:
    found: list[str] = browser.js(
        f"[...document.querySelectorAll('#{box} svg text')].map(t => t.textContent)"
    )
    return found


def test_every_section_is_drawn_without_a_complaint(browser: Browser, page: str) -> None:
    browser.open(page)
    shown = browser.js("[...document.querySelectorAll('section:not([hidden])')].map(s => s.id)")
    assert shown == ["result", "ablation", "loss", "target", "schedules", "throughput", "plans",
                     "events", "mask", "samples", "config", "repeat"]  # fmt: skip
    assert browser.js("document.querySelectorAll('#loss-chart path.series').length") == 6
    assert browser.js("document.querySelectorAll('#target-figure rect.mean').length") == 2
    assert browser.js("document.querySelectorAll('#forest-figure circle.effect').length") == 5
    assert browser.js("document.querySelectorAll('#schedules svg').length") == 3
    assert browser.js("document.querySelectorAll('#events path.event').length") == 12
    assert "target 4.4" in ticks(browser, "loss-chart")
    assert browser.js("window.boom") is None
    assert "onerror" in browser.js("document.querySelector('#samples pre').textContent")
    assert browser.problems() == []


def test_the_axis_switches_by_keyboard(browser: Browser, page: str) -> None:
    browser.open(page)
    assert "100k" in ticks(browser, "loss-chart")
    browser.js("document.querySelector('input[name=axis]:checked').focus()")
    browser.press("ArrowRight")
    assert browser.js("document.querySelector('input[name=axis]:checked').value") == "steps"
    assert "20" in ticks(browser, "loss-chart")
    assert "baseline32" in ticks(browser, "target-figure")  # between validations at 32 and 36
    browser.press("ArrowRight")
    assert "10 s" in ticks(browser, "loss-chart")
    assert "baseline16.2 s" in ticks(browser, "target-figure")
    browser.press("ArrowRight")
    assert browser.js("document.activeElement.value") == "wall"
    assert browser.problems() == []


def test_times_of_a_shared_machine_are_no_axis_and_marked(browser: Browser, tmp_path: Path) -> None:
    runs = [plain_run(tmp_path / f"{i}", made_config(f"machine.jobs={i}")) for i in (1, 2)]
    table = words(browser, tmp_path / "page.html", build_page(runs), "result")
    axes = "[...document.querySelectorAll('input[name=axis]')].map(one => one.value)"
    assert browser.js(axes) == ["tokens", "steps"]
    lead = browser.js("document.querySelector('#lead').textContent")
    assert lead.endswith("2 runs at a time shared the machine: times do not compare")
    assert table.count("20 s, shared") == 1  # the other run had it to itself
    assert table.count("20 s") == 2


def test_curves_switch_and_hide(browser: Browser, page: str) -> None:
    browser.open(page)
    browser.js("document.querySelector('#loss .legend button').click()")
    assert browser.js("document.querySelectorAll('#loss-chart path.series').length") == 3
    assert browser.js("document.querySelector('#loss .legend button').ariaPressed") == "false"
    browser.js("document.querySelector('#loss .legend button').click()")
    assert browser.js("document.querySelectorAll('#loss-chart path.series').length") == 6
    path = "document.querySelector('#loss-chart path.series').getAttribute('d')"
    before = browser.js(path)
    browser.js("document.querySelector('input[name=curve][value=train]').click()")
    training = browser.js(path)
    assert training != before
    assert "Training loss" in browser.js("document.querySelector('#loss-chart svg').ariaLabel")
    browser.js("document.querySelector('input[name=range][value=whole]').click()")
    assert browser.js(path) != training
    browser.js("document.querySelector('input[name=effect][value=tokens_to_target]').click()")
    assert "tokens to target" in browser.js("document.querySelector('#ablation p').textContent")
    browser.js("document.querySelector('input[name=rate][value=share]').click()")
    assert any("%" in text for text in ticks(browser, "throughput-chart"))
    assert browser.problems() == []


def test_of_two_validations_the_training_curve_is_shown(browser: Browser, tmp_path: Path) -> None:
    chosen = "document.querySelector('input[name=curve]:checked').value"
    run = plain_run(tmp_path / "run", made_config())
    words(browser, tmp_path / "whole.html", build_page([run]), "loss")
    assert browser.js(chosen) == "val"
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    between = [row for row in rows if row["kind"] == "val"][1:-1]
    assert between
    kept = [row for row in rows if row not in between]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in kept))
    words(browser, tmp_path / "ends.html", build_page([run]), "loss")
    assert browser.js(chosen) == "train"
    assert browser.problems() == []


def test_the_cursor_reads_values_by_key(browser: Browser, page: str) -> None:
    browser.open(page)
    browser.js("document.querySelector('#loss-chart svg').focus()")
    browser.press("ArrowLeft")
    text = browser.js("document.querySelector('#loss-chart .tip:not([hidden])').textContent")
    assert "295k" in text  # 36 steps of 8192 tokens, the last validation but one
    assert "baseline4.1195" in text  # 7 - 0.08 * 36 and half of the second seed's -0.001


def test_the_mask_follows_its_slider(browser: Browser, page: str) -> None:
    browser.open(page)
    full = "document.querySelector('#mask-figure path.full').getAttribute('d')"
    at_end = browser.js(full)
    assert at_end
    browser.js("const s = document.querySelector('#mask-step'); s.value = 0; "
               "s.dispatchEvent(new Event('input'))")  # fmt: skip
    assert browser.js(full) == ""  # a window of one block holds no full block
    assert "128 tokens" in browser.js("document.querySelector('#mask').textContent")


def test_a_phone_needs_no_sideways_scrolling(browser: Browser, page: str) -> None:
    browser.open(page, width=360)
    assert browser.js("document.documentElement.scrollWidth") <= 360
    assert browser.js("document.querySelector('#loss-chart svg').viewBox.baseVal.width") < 360
    sizes = browser.js(
        "[...document.querySelectorAll('#loss-chart svg text')].map("
        "t => parseFloat(getComputedStyle(t).fontSize) * t.ownerSVGElement.clientWidth / "
        "t.ownerSVGElement.viewBox.baseVal.width)"
    )
    assert min(sizes) > 11
    assert browser.problems() == []


def test_dark_light_and_paper(browser: Browser, page: str) -> None:
    def brightness() -> float:
        found: float = browser.js(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3)"
            ".reduce((a, b) => a + Number(b), 0) / 765"
        )
        return found

    browser.open(page, dark=True)
    assert brightness() < 0.2
    browser.js("document.querySelector('#theme').click()")
    assert brightness() > 0.9
    browser.js("document.querySelector('#theme').click()")
    browser.media("print", dark=True)
    assert brightness() == 1.0
    assert browser.js("getComputedStyle(document.querySelector('#bar')).display") == "none"
    pdf = base64.b64decode(browser.call("Page.printToPDF", printBackground=True)["data"])
    assert pdf.startswith(b"%PDF")
    assert browser.problems() == []


def words(browser: Browser, out: Path, page: str, section: str) -> str:
    """What a section of a page says."""
    out.write_text(page)
    browser.open(out.as_uri())
    assert browser.problems() == []
    found: str = browser.js(f"document.querySelector('#{section}').textContent")
    return found


def test_a_change_without_a_number_is_listed_and_counted(browser: Browser, tmp_path: Path) -> None:
    def row(switch: str, effect: float | None, n: int) -> dict[str, Any]:
        p = None if effect is None else 0.001
        return {"switch": switch, "metric": "tokens_to_target", "effect": effect, "low": effect,
                "high": effect, "p": p, "p_holm": p and 3 * p, "n": n, "of": 3}  # fmt: skip

    effects = [row("slow", None, 1), row("good", -9.0, 3), row("bad", 8.0, 3)]
    effects += [one | {"metric": "val_loss"} for one in effects]
    page = build_page([], None, ablation("modern", effects))
    text = words(browser, tmp_path / "page.html", page, "ablation")
    assert "correction for 3 tests" in text
    assert "not all pairs have a number" in text
    browser.js("document.querySelector('input[name=effect][value=tokens_to_target]').click()")
    text = browser.js("document.querySelector('#ablation').textContent")
    assert "correction for 3 tests" in text
    assert "not all pairs reached the target" in text
    drawn = ticks(browser, "forest-figure")
    assert [word for word in drawn if word in ("bad", "good", "slow")] == ["bad", "good", "slow"]
    assert "1 of 3 pairs reached the target" in drawn
    assert browser.js("document.querySelectorAll('#forest-figure circle.effect').length") == 2
    last = "[...document.querySelectorAll('#ablation tr')].at(-1).cells"
    assert browser.js(f"[...{last}].map(c => c.textContent).slice(0, 8)") == [
        "slow", "–", "–", "–", "–", "–", "", "1 of 3",
    ]  # fmt: skip
    assert "2 of 3" in browser.js("document.querySelector('#result').textContent")


def test_effects_that_no_pair_has_are_not_offered(browser: Browser, tmp_path: Path) -> None:
    """As of tokens to a target where none was set."""
    row = {"switch": "x", "low": 0.0, "high": 0.2, "p": 0.01, "of": 3}
    effects = [
        row | {"metric": "val_loss", "effect": 0.1, "n": 3},
        row | {"metric": "tokens_to_target", "effect": None, "n": 0},
    ]
    page = build_page([], None, ablation("modern", effects))
    assert "Effect on final loss" in words(browser, tmp_path / "page.html", page, "ablation")
    assert browser.js("document.querySelectorAll('input[name=effect]').length") == 0


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ([100, 9000], [50, 60], "the seeds differ too much for an interval"),
        ([100], [50], "one seed: no interval"),
        ([100, 101], [50], "one seed: no interval"),
    ],
)
def test_why_a_ratio_has_no_interval(
    browser: Browser, tmp_path: Path, first: list[int], second: list[int], reason: str
) -> None:
    entries = [
        {"recipe": recipe, "seed": seed, "tokens_to_target": tokens}
        for recipe, values in (("slow", first), ("fast", second))
        for seed, tokens in enumerate(values)
    ]
    page = build_page([], Race.model_validate({"target": 4.0, "entries": entries}))
    assert reason in words(browser, tmp_path / "page.html", page, "result")


def test_what_a_run_sets_otherwise_than_its_record_is_said(
    browser: Browser, tmp_path: Path
) -> None:
    config = resolve("record-09", "small", ["train.steps=250", "model.softcap=15.0"]).config
    page = build_page([plain_run(tmp_path / "a", config, slope=0.01, every=125)])
    said = "record-09 is set otherwise than record 9 in model.softcap."
    for section in ("published", "loss"):
        assert said in words(browser, tmp_path / "page.html", page, section)


def test_pictures_left_out_are_named(browser: Browser, tmp_path: Path) -> None:
    window = ("attention.window=blocks", "attention.window_start=128", "attention.window_end=512")
    runs = [
        plain_run(tmp_path / f"{steps}", made_config(*window, f"train.steps={steps}"))
        for steps in range(40, 48)
    ]
    text = words(browser, tmp_path / "page.html", build_page(runs), "mask")
    assert "small: modern (train.steps=46), modern (train.steps=47)." in text
    text = words(browser, tmp_path / "page.html", build_page(runs[:6]), "mask")
    assert "No picture" not in text


def test_the_live_page_draws_what_is_logged(browser: Browser, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", "modern", 0, 0.05)
    with Server(Source([run.path]), 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        browser.open(server.address, offline=False)
        browser.until("document.querySelector('#live').textContent === 'live'")
        browser.js("document.querySelector('input[name=axis][value=steps]').click()")
        run.log("val", step=44, tokens=1, seconds=22.0, wall_seconds=30.0, loss=3.5)
        browser.until("document.querySelector('#result').textContent.includes('3.5000')")
        assert browser.js("document.querySelector('input[name=axis]:checked').value") == "steps"
        assert browser.problems() == []
        browser.open("about:blank")
        server.shutdown()
        thread.join(10)
