"""The page in a real browser: headless Chromium through its debugging pipe, the network off."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speedrun.config.resolve import resolve
from speedrun.report.page import build_page
from speedrun.report.page.watch import Server, Source
from speedrun.train.run import RunFolder
from tests.waiting import PATIENCE, wait_for

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip
# Chromium wants its pipe on descriptors 3 and 4; copies above 9 keep clear of both.
LAUNCH = """
import fcntl, os, sys
copies = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
for fd, place in zip(copies, (3, 4)):
    os.dup2(fd, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
# A figure is drawn in the frame after the one that finds its width.
FRAMES = """new Promise((done) => {
  let left = 4;
  (function next() { left-- ? requestAnimationFrame(next) : done(); })();
})"""
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "Tab": 9, "Enter": 13}


class Browser:
    """One tab. Commands and events are JSON messages ended by a zero byte, on fds 3 and 4."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out), CHROMIUM, *FLAGS,
             f"--user-data-dir={profile}"],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._ids = b"", itertools.count(1)
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._in], [], [], PATIENCE)[0], "the browser is silent"
            piece = os.read(self._in, 1 << 16)
            assert piece, "the browser is gone"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        message = {"id": next(self._ids), "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == message["id"]:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found
            self.events.append(answer)

    def js(self, text: str) -> Any:
        """The value of `text`; what it sets off is drawn before this returns."""
        found = self.call("Runtime.evaluate", expression=text, returnByValue=True)
        assert "exceptionDetails" not in found, found
        self.settle()
        return found["result"].get("value")

    def settle(self) -> None:
        self.call("Runtime.evaluate", expression=FRAMES, awaitPromise=True)

    def until(self, text: str) -> None:
        wait_for(lambda: bool(self.js(text)), text)

    def open(
        self, address: str, *, width: int = 1200, dark: bool = False, offline: bool = True
    ) -> None:
        self.events.clear()
        self.call("Network.emulateNetworkConditions", offline=offline, latency=0,
                  downloadThroughput=-1, uploadThroughput=-1)  # fmt: skip
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900,
                  deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        self.media("", dark)
        loader = self.call("Page.navigate", url=address)["loaderId"]
        while not self._loaded(loader):  # the page before may have the same address
            self.events.append(self._receive())
        self.settle()

    def _loaded(self, loader: str) -> bool:
        news = [e["params"] for e in self.events if e.get("method") == "Page.lifecycleEvent"]
        return any(one["loaderId"] == loader and one["name"] == "load" for one in news)

    def media(self, kind: str, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=kind, features=[scheme])

    def press(self, key: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                      windowsVirtualKeyCode=KEYS[key])  # fmt: skip
        self.settle()

    def problems(self) -> list[Any]:
        """Exceptions, console errors and warnings, and every request but for the page itself."""
        self.js("1")
        bad = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            entry = params.get("entry", {}).get("level") or params.get("type")
            if method == "Runtime.exceptionThrown" or (
                method in ("Log.entryAdded", "Runtime.consoleAPICalled")
                and entry in ("error", "warning")
            ):
                bad.append(params)
            if method == "Network.requestWillBeSent":
                address = params["request"]["url"]
                if not address.startswith(("file:", "data:", "http://127.0.0.1:")):
                    bad.append(address)
        return bad

    def close(self) -> None:
        self.call("Browser.close")
        self._process.wait(PATIENCE)
        os.close(self._out)
        os.close(self._in)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


def made_run(path: Path, recipe: str, seed: int, slope: float) -> RunFolder:
    config = resolve("modern", "nano", [
        "train.steps=40", "train.target=5.0", f"train.seed={seed}", "optimizer.kind=muon",
        "attention.documents=true", "attention.window=blocks", "attention.window_start=128",
        "attention.window_end=1024", "batch.length=2048",
    ]).config.model_copy(update={"recipe": recipe})  # fmt: skip
    run = RunFolder(path)
    path.mkdir(parents=True)
    run.create(config)
    run.log("start", step=0, peak_flops=1e11)
    for step in range(41):
        where = {"step": step, "tokens": step * 8192, "seconds": 0.5 * step,
                 "wall_seconds": 3 + 0.6 * step}  # fmt: skip
        loss = 7.6 - slope * step + 0.01 * seed * (step > 0)
        if step:
            run.log("train", **where, loss=loss, ms=500.0 + step, peak_share=0.3)
        if step % 4 == 0:
            run.log("val", **where, loss=loss, bits_per_byte=loss / 2)
    run.log("nonfinite", step=20)
    run.log("sample", prompt="def ", text="def f():<img src=x onerror='window.boom=1'>")
    run.write_summary({"steps": 40, "params": 1000, "tokens_per_second": 16000.0})
    return run


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
    out.write_text(build_page(runs, None, {"recipe": "record-18", "effects": effects}))
    return out.as_uri()


def ticks(browser: Browser, box: str) -> list[str]:
    found: list[str] = browser.js(
        f"[...document.querySelectorAll('#{box} svg text')].map(t => t.textContent)"
    )
    return found


def test_every_section_is_drawn_without_a_complaint(browser: Browser, page: str) -> None:
    browser.open(page)
    shown = browser.js("[...document.querySelectorAll('section:not([hidden])')].map(s => s.id)")
    assert shown == ["result", "ablation", "loss", "target", "schedules", "throughput", "events",
                     "mask", "samples", "config", "repeat"]  # fmt: skip
    assert browser.js("document.querySelectorAll('#loss-chart path.series').length") == 6
    assert browser.js("document.querySelectorAll('#target-figure rect.mean').length") == 2
    assert browser.js("document.querySelectorAll('#forest-figure circle.effect').length") == 5
    assert browser.js("document.querySelectorAll('#schedules svg').length") == 3
    assert browser.js("document.querySelectorAll('#events path.event').length") == 8
    assert "target 5" in ticks(browser, "loss-chart")
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
    assert any("36" in text for text in ticks(browser, "target-figure"))  # 32.5, seen every 4
    browser.press("ArrowRight")
    assert "10 s" in ticks(browser, "loss-chart")
    assert "baseline18 s" in ticks(browser, "target-figure")
    browser.press("ArrowRight")
    assert browser.js("document.activeElement.value") == "wall"
    assert browser.problems() == []


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


def test_the_cursor_reads_values_by_key(browser: Browser, page: str) -> None:
    browser.open(page)
    browser.js("document.querySelector('#loss-chart svg').focus()")
    browser.press("ArrowLeft")
    text = browser.js("document.querySelector('#loss-chart .tip:not([hidden])').textContent")
    assert "295k" in text  # 36 steps of 8192 tokens, the last validation but one
    assert "baseline4.7250" in text  # 7.6 - 0.08 * 36 and half of the second seed's 0.01


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
