"""The page of `speedrun serve` in a real browser, against a real server with two trained runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import speedrun.serve
from speedrun.config.resolve import resolve
from speedrun.serve.server.app import OWN
from tests.conftest import TINY
from tests.report.browser import CTRL, SHIFT, Browser
from tests.serve.paging import (
    CARD,
    CONTRASTS,
    DONE,
    TOKENS,
    fill,
    lightness,
    opened,
    texts,
    write,
)
from tests.serve.served import Served, serving
from tests.train.heard import train

# Windows of the first run: it sees 64 tokens of the 128 it remembers, inside of its document.
WINDOW = (
    "batch.length=128", "batch.tokens=512", "attention.documents=true", "attention.window=tokens",
    "attention.window_start=64", "attention.window_end=64",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    runs = []
    for name, more in (("one", WINDOW), ("two", ("batch.length=256",))):
        config = resolve("modern", "nano", [*TINY, f"data.dir={tiny_dataset}", *more]).config
        runs.append(tmp_path_factory.mktemp("runs") / name)
        train(config, runs[-1])
    with serving(runs) as served:
        yield served


@pytest.fixture
def page(browser: Browser, server: Served) -> Browser:
    return opened(browser, server)


def test_every_file_of_the_page_is_served(server: Served) -> None:
    folder = Path(speedrun.serve.__file__).parent / "page"
    assert {path.name for path in folder.iterdir()} == {*OWN, "page.html"}
    for name in OWN:
        status, body, headers = server.request("GET", f"/{name}")
        assert (status, body) == (200, (folder / name).read_bytes())
        assert headers["content-type"].startswith(("text/", "image/svg+xml"))


def test_a_text_streams_in_beside_another(page: Browser, server: Served) -> None:
    assert page.js("document.title") == "one beside two · Speedrun"
    assert "recipe modern · track nano · step 8" in texts(page, ".facts")[0]
    assert "a window of 64 tokens" in texts(page, ".facts")[0]
    assert all(text.startswith("Nothing is written") for text in texts(page, ".output"))
    write(page, "1 + 2", max_tokens=30, temperature=0)
    for name, text in zip(("one", "two"), texts(page, ".output"), strict=True):
        _, said = server.ask(model=name, prompt="1 + 2", max_tokens=30, temperature=0)
        assert text == "1 + 2" + said["choices"][0]["text"]
    assert texts(page, ".prompt") == ["1 + 2", "1 + 2"]
    assert page.js(f"{TOKENS}.length") == 60
    for status in texts(page, ".status"):
        assert re.fullmatch(
            r"30 tokens, [\d,]+ a second; it reached the 30 tokens asked for", status
        )
    said = page.js("document.querySelector('#said').textContent")
    assert said.startswith("one: 30 tokens")
    assert page.problems() == []


def test_hovering_shows_odds_and_alternatives(page: Browser) -> None:
    write(page, "1 + 2", max_tokens=30, temperature=0)
    page.point(f"{TOKENS}[3]")
    assert page.js(f"{CARD}.querySelector('.drawn').textContent").endswith("the likeliest")
    shares = texts(page, "#card .share")
    assert len(shares) == 10
    numbers = [float(share.rstrip("%")) for share in shares]
    assert numbers == sorted(numbers, reverse=True)  # tokens that are digits too
    assert page.js("document.querySelectorAll('#card .mine').length") == 1
    width = page.js("document.querySelector('#card .bar i').getBoundingClientRect().width")
    whole = page.js("document.querySelector('#card .bar').getBoundingClientRect().width")
    assert width / whole == pytest.approx(numbers[0] / 100, abs=0.02)
    page.point("document.querySelector('h1')")
    assert page.js(CARD) is None
    assert page.problems() == []


def test_an_unlikely_token_is_marked_beside_the_likely_ones(page: Browser) -> None:
    write(page, "1", max_tokens=40, temperature=50, top_k=0)
    unlikely = "t.classList.contains('level4') && /^[!-~]$/.test(t.textContent)"
    page.js(f"{TOKENS}.find(t => {unlikely}).click()")
    assert "not among the 10 likeliest" in page.js(f"{CARD}.textContent")
    assert page.js("document.querySelectorAll('#card .row').length") == 11
    assert page.js("[...document.querySelectorAll('#card .row')].at(-1).className") == "row mine"
    shaded = "getComputedStyle(document.querySelector('.token.level4')).backgroundColor"
    plain = "rgba(0, 0, 0, 0)"
    assert page.js(shaded) != plain
    page.js("document.querySelector('#shade').click()")
    assert page.js(shaded) == plain
    assert page.problems() == []


def test_everything_by_keyboard(page: Browser) -> None:
    assert page.js("document.activeElement.id") == "prompt"
    page.type("3 + 4")
    page.press("Enter")
    page.type("5")
    assert page.js("document.querySelector('#prompt').value") == "3 + 4\n5"
    page.js("window.visited = []; addEventListener('focusin', "
            "({ target }) => visited.push(target.id || target.textContent))")  # fmt: skip
    for _ in range(7):
        page.press("Tab")
    page.type("0")
    page.press("Enter", CTRL)
    page.until(DONE)
    for _ in range(9):
        page.press("Tab")
    assert page.js("visited.slice(0, -1)") == [
        "Once upon a time", "def main(", "two documents", "write", "on", "clear", "temperature",
        "top_k", "seed", "new-seed", "max_tokens", "More", "left", "right", "shade",
    ]  # fmt: skip
    at = f"{TOKENS}.indexOf(document.activeElement)"
    assert page.js(at) == 0
    assert page.js(CARD) is not None
    for key, place in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 199),
                       ("ArrowRight", 199), ("Home", 0)):  # fmt: skip
        page.press(key)
        assert page.js(f"{CARD} && {at}") == place
    assert page.js("document.activeElement.ariaLabel").strip()
    assert page.js("document.querySelectorAll('.token[role], .token[tabindex]').length") == 2
    page.press("ArrowDown")
    assert page.js(at) > 1
    page.press("ArrowUp")
    assert page.js(at) == 0
    page.press("Escape")
    assert page.js(CARD) is None
    page.press("Tab")
    assert page.js(f"document.activeElement.closest('.output') !== {TOKENS}[0].closest('.output')")
    page.press("Tab", SHIFT)
    assert page.js(at) == 0
    assert page.problems() == []


def test_stop_write_on_and_clear(page: Browser) -> None:
    disabled = "document.querySelector('#on').ariaDisabled"
    assert page.js(disabled) == "true"
    fill(page, prompt="1 + ", max_tokens=8192, temperature=0)
    page.js("document.querySelector('#write').click()")
    page.until("document.querySelectorAll('.token').length > 20")
    assert page.js("document.querySelector('#write').ariaDisabled") == "true"
    page.press("Escape")
    page.until(DONE)
    assert all(text.endswith("stopped") for text in texts(page, ".status"))
    before = texts(page, ".output")
    count = page.js(f"{TOKENS}.length")
    assert page.js(disabled) == "false"
    fill(page, max_tokens=5)
    page.js("document.querySelector('#on').click()")
    page.until(f"{TOKENS}.length === {count} + 10 && {DONE}")
    after = texts(page, ".output")
    assert all(new.startswith(old) for new, old in zip(after, before, strict=True))
    page.js("document.querySelector('#clear').click()")
    assert page.js(f"{TOKENS}.length") == 0
    assert page.js("document.querySelector('#prompt').value") == ""
    assert page.js(disabled) == "true"
    assert page.problems() == []


def test_more_than_the_context_can_be_written_on(page: Browser) -> None:
    """Of a text that is longer the later half of the context is sent again."""
    write(page, "7 + 1", max_tokens=150, temperature=0)
    fill(page, max_tokens=40)
    page.js("document.querySelector('#on').click()")
    page.until(f"{TOKENS}.length === 380 && {DONE}")
    said = texts(page, ".sight .say")[0]
    found = re.fullmatch(
        r"The last token saw 64 of the 195 tokens before it: the first (\d+) had been forgotten, "
        r"since the context holds 128; the window of 64 tokens hides (\d+)\.",
        said,
    )
    assert found is not None, said
    assert sum(map(int, found.groups())) == 195 - 64
    text = texts(page, ".output")[0]
    assert texts(page, ".through")[0] == text
    assert page.problems() == []


def test_what_the_last_token_saw(page: Browser) -> None:
    prompt = "first<|endoftext|>second, which is longer<|endoftext|>3 + "
    write(page, prompt, max_tokens=80, temperature=0)
    one, two = texts(page, ".sight .say")
    # Tokens are bytes: 1 + 5, 1 + 23, 1 + 4 in the prompt, and 79 before the last.
    assert one == ("The last token saw 64 of the 114 tokens before it: the first 30 are of other "
                   "documents; the window of 64 tokens hides 20.")  # fmt: skip
    assert two == ("The last token saw all 114 tokens before it. "
                   "This run sees across documents.")  # fmt: skip
    view = "document.querySelector('.sight')"
    kinds = page.js(f"[...{view}.querySelectorAll('.strip i')].map(i => i.className)")
    assert kinds == ["document", "document opens", "window opens", "seen", "last"]
    shares = page.js(f"[...{view}.querySelectorAll('.strip i')].map(i => i.style.flexGrow)")
    assert shares == ["6", "24", "20", "64", "1"]
    parts = page.js(
        f"[...{view}.querySelectorAll('.through > *')].map(s => [s.className, s.textContent])"
    )
    assert parts[:3] == [["document", "first"], ["border", "new document"],
                         ["document", "second, which is longer"]]  # fmt: skip
    assert [len(text) for kind, text in parts if kind == "seen"] == [64]
    assert texts(page, ".output .border")[:2] == ["new document"] * 2
    assert page.problems() == []


def test_characters_split_over_tokens(page: Browser) -> None:
    """The scripts by themselves: what a small model writes is hardly ever more than ASCII."""
    page.js("""import("/tokens.js").then(({ WrittenText }) => {
      const box = document.createElement("div");
      const text = window.text = new WrittenText(box);
      text.begin("é");
      const token = (...bytes) => ({ name: "", logOdds: -1, alternatives: [], bytes });
      text.add([token(0x61, 0xc3), token(0xa9), token(0xf0, 0x9f), token(0x99)]);
      text.add([token(0x82, 0x0a), token(0xe2)]);
      text.end(Infinity);
      window.ended = [...text.spans].map((span) => [span.textContent, text.tokensOf(span).length]);
      text.goOn();
      text.add([token(0x82), token(0xac), token()]);
      text.end(1);
      window.after = [...text.spans].map((span) => [span.textContent, text.tokensOf(span).length]);
      text.add([token(0x62, 0x63, 0x64)]);
    })""")
    page.until("window.after")
    assert page.js("ended") == [["a", 1], ["é", 1], ["🙂\n", 3], ["\ufffd", 1]]
    assert page.js("after") == [["a", 1], ["é", 1], ["🙂\n", 3], ["€", 3], ["end of text", 1]]
    page.js("text.end(2)")
    assert page.js("text.spans.at(-1).innerHTML") == "b<s>cd</s>"  # a stop string within a token
    assert page.problems() == []


WRONG = {
    ("temperature", "-1"): "Temperature is 0 or more",
    ("temperature", ""): "Temperature is 0 or more",
    ("top_k", "1.5"): "Top-k is a whole number, 0 or more",
    ("top_p", "1.1"): "Top-p is from 0 to 1",
    ("repetition_penalty", "0"): "Repetition penalty is from 0.01 to 1,000",
    ("seed", "-3"): "Seed is a whole number, 0 or more",
    ("max_tokens", "9000"): "Tokens is a whole number from 1 to 8,192",
    ("stop-strings", "x\n" * 17): "At most 16 strings of 256 characters",
}


def test_wrong_values_are_named_and_not_sent(page: Browser, server: Served) -> None:
    found = page.js(f"""{json.dumps([*WRONG])}.map(([name, value]) => {{
      const field = document.getElementById(name);
      const before = field.value;
      const fill = (value) => {{ field.value = value; field.dispatchEvent(new Event("input")); }};
      const wrong = () => [...document.querySelectorAll(".wrong")].map((one) => one.textContent);
      fill(value);
      document.getElementById("write").click();
      const said = [wrong(), document.activeElement.id, field.ariaInvalid];
      fill(before);
      return [...said, wrong()];
    }})""")
    assert found == [[[words], name, "true", []] for (name, _), words in WRONG.items()]
    assert not page.js("document.querySelector('.writing, .token')")  # nothing was asked for
    fill(page, max_tokens=3, prompt="kept")
    page.js("document.querySelector('#new-seed').click()")
    seed = page.js("document.querySelector('#seed').value")
    assert seed != "0"
    page.open(server.address, offline=False)
    kept = "['seed', 'max_tokens', 'prompt'].map((name) => document.getElementById(name).value)"
    assert page.js(kept) == [seed, "3", "kept"]
    assert page.problems() == []


def answering(*pieces: str, status: int = 200) -> str:
    """A script after which the server seems to answer so, once."""
    return f"""(() => {{
      const real = fetch;
      window.fetch = () => {{
        window.fetch = real;
        return Promise.resolve(new Response({"".join(pieces)!r}, {{ status: {status} }}));
      }};
    }})()"""


def test_errors_are_sentences_and_the_next_attempt_works(page: Browser) -> None:
    page.js("(() => { const s = document.querySelector('#right'); s.value = ''; "
            "s.dispatchEvent(new Event('change')); })()")  # fmt: skip
    assert page.js("document.querySelectorAll('.output').length") == 1
    shown = "document.querySelector('.error:not([hidden])')?.textContent"
    odds = {
        "tokens": ["a"],
        "token_logprobs": [-1.0],
        "top_logprobs": [{}],
        "ids": [97],
        "bytes": [[97]],
    }
    choice = {"text": "a", "finish_reason": None, "logprobs": odds}
    event = f"data: {json.dumps({'choices': [choice]})}\n\n"
    fault = 'data: {"error": {"message": "a fault"}}\n\n'
    for script, words in (
        (answering('{"error": {"message": "busy: try again"}}', status=429), "Busy: try again."),
        (answering("no JSON", status=500), "The server answered with status 500."),
        (answering(event, fault), "A fault."),
        (answering(event), "The server went away in the middle of the text."),
    ):
        page.js(script)
        page.js("document.querySelector('#write').click()")
        page.until(f"{shown} === {words!r}")
        assert page.js("document.querySelector('#stop').hidden")
    fill(page, prompt="9" * 2000)
    page.js("document.querySelector('#write').click()")
    page.until(f"({shown} ?? '').includes('the context holds 128 tokens: shorten it.')")
    conditions: dict[str, Any] = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.call("Network.emulateNetworkConditions", offline=True, **conditions)
    page.js("document.querySelector('#write').click()")
    page.until(f"({shown} ?? '').startsWith('The server does not answer')")
    page.call("Network.emulateNetworkConditions", offline=False, **conditions)
    write(page, "1 + 1", max_tokens=5)
    assert page.js(shown) is None
    assert page.js(f"{TOKENS}.length") == 5


def test_a_phone_needs_no_sideways_scrolling(browser: Browser, server: Served) -> None:
    page = opened(browser, server, width=360)
    write(page, "1" * 50 + "<|endoftext|>" + "2" * 50, max_tokens=60, temperature=2)
    assert not page.js("document.querySelector('#drawing').open")
    summary = page.js("document.querySelector('#drawn-by').textContent")
    assert summary == "Temperature 2 · top-k 50 · seed 0 · 60 tokens"
    page.js("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    page.js(f"{TOKENS}[40].click()")
    assert page.js("document.documentElement.scrollWidth") <= 360
    left, right = page.js(
        f"(() => {{ const b = {CARD}.getBoundingClientRect(); return [b.left, b.right] }})()"
    )
    assert (left, right) == (8, 352)
    tops = page.js(
        "[...document.querySelectorAll('.output')].map(o => o.getBoundingClientRect().left)"
    )
    assert tops[0] == tops[1]  # one below the other
    assert page.problems() == []
    page = opened(browser, server)
    tops = page.js(
        "[...document.querySelectorAll('.output')].map(o => o.getBoundingClientRect().top)"
    )
    assert tops[0] == tops[1]  # beside each other


@pytest.mark.parametrize("dark", [False, True])
def test_dark_and_light_can_be_read(browser: Browser, server: Served, dark: bool) -> None:
    page = opened(browser, server, dark=dark)
    assert (lightness(page) < 0.2) is dark
    write(page, "1<|endoftext|>2 + 3", max_tokens=90, temperature=3)
    page.js(f"{TOKENS}[40].click()")
    contrasts = page.js(CONTRASTS)
    assert len(contrasts) > 150
    assert [one for one in contrasts if one[0] < 4.5] == []
    page.js("document.querySelector('#theme').click()")
    assert (lightness(page) < 0.2) is not dark
    page.open(server.address, dark=dark, offline=False)
    assert (lightness(page) < 0.2) is not dark  # remembered
    assert page.problems() == []
