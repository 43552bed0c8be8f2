"""The documents as a site: built as `make docs` does, every link followed, in a browser."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest

from tests.documents import ROOT
from tests.report.browser import Browser
from tests.serve.paging import CONTRASTS, lightness

# What a page loads by itself, as against what a reader may follow.
LOADING = {
    "script": "src", "img": "src", "source": "src", "iframe": "src", "video": "src",
    "object": "data", "use": "href",
}  # fmt: skip
FOLLOWED = ("next", "prev", "canonical", "alternate")  # kinds of <link> that load nothing
PHONE, DESK = 390, 1280


class Read(HTMLParser):
    """What a page has to link to, and what it links to or loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link":
            to = self.links if values.get("rel") in FOLLOWED else self.loaded
            to.append(values["href"])
        if LOADING.get(tag) in values:
            self.loaded.append(values[LOADING[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="NOT TESTED: the site; `make integration` installs mkdocs")
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    """The address of the site at `python -m http.server`."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Read]:
    return {path: Read(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def problems(pages: dict[Path, Read]) -> Iterator[str]:
    for path, page in pages.items():
        for link in page.loaded:
            if urlsplit(link).scheme not in ("", "data") or link.startswith("//"):
                yield f"{path.name} loads {link}"
        for link in (*page.links, *page.loaded):
            parts = urlsplit(link)
            if parts.scheme:
                continue
            assert not link.startswith("/"), f"{path.name}: {link} leads out of a folder on a disk"
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                yield f"{path.name}: {link} leads nowhere"
            elif parts.fragment and target.suffix == ".html":
                known = pages[target].anchors if target in pages else set()
                if unquote(parts.fragment) not in known:
                    yield f"{path.name}: {link} has no such place"


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(
    site: Path, pages: dict[Path, Read]
) -> None:
    own = {path: page for path, page in pages.items() if path.name != "404.html"}
    assert len(own) > 12
    assert list(problems(own)) == []
    for sheet in site.rglob("*.css"):
        for address in re.findall(r"url\(([^)]*)\)|@import\s+([^;]*)", sheet.read_text()):
            shown = "".join(address).strip("\"'")
            assert not shown.startswith(("http", "//")), f"{sheet.name}: {shown}"


def test_a_wrong_link_would_be_found(tmp_path: Path) -> None:
    page, other = (tmp_path / name for name in ("a.html", "b.html"))
    for path in (page, other):
        path.touch()
    text = '<a href="b.html#no"></a><a href="c.html"></a><script src="https://x.y/z.js"></script>'
    found = list(problems({page: Read(text), other: Read('<p id="yes">')}))
    assert [problem.rpartition(" ")[0] for problem in found] == [
        "a.html loads", "a.html: b.html#no has no such", "a.html: c.html leads"
    ]  # fmt: skip


def test_every_document_is_a_page(site: Path) -> None:
    documents = {path.stem for path in (ROOT / "docs").glob("*.md")}
    documents |= {"CONTRIBUTING", "reference/verbs", "reference/keys"}
    assert [name for name in documents if not (site / f"{name}.html").is_file()] == []


@pytest.mark.parametrize("dark", [False, True])
def test_every_page_fits_a_phone_and_can_be_read(site: Path, browser: Browser, dark: bool) -> None:
    for path in sorted(site.rglob("*.html")):
        if "code" in path.parts or path.name == "404.html":
            continue
        browser.open(path.as_uri(), width=PHONE, dark=dark)
        wide = browser.js("document.documentElement.scrollWidth")
        assert wide <= PHONE, f"{path.name} is {wide} wide"
        assert (lightness(browser) < 0.3) == dark
        assert browser.problems() == []
        pale = [(ratio, text) for ratio, text in browser.js(CONTRASTS) if ratio < 4.5]
        assert pale == [], path.name


def test_the_keyboard_is_enough(site: Path, browser: Browser) -> None:
    browser.open((site / "index.html").as_uri(), width=DESK)
    browser.press("Tab")
    assert browser.js("document.activeElement.innerText.trim()") == "Skip to content"
    seen = []
    for _ in range(6):
        browser.press("Tab")
        seen.append(browser.js("getComputedStyle(document.activeElement).outlineStyle"))
    assert set(seen) == {"solid"}


@pytest.mark.parametrize("kind", ["disk", "server"])
def test_search_works(site: Path, browser: Browser, served: str, kind: str) -> None:
    address = site.as_uri() if kind == "disk" else served
    browser.open(f"{address}/reference/keys.html", width=DESK, offline=kind == "disk")
    browser.js("document.querySelector('.md-search__input').focus()")
    browser.type("softcap")
    browser.press("End")
    browser.until("document.querySelectorAll('.md-search-result__item').length > 0")
    first = browser.js("document.querySelector('.md-search-result__item').innerText")
    assert "Keys" in first
    assert browser.problems() == []


def test_the_palette_is_toggled_and_kept(site: Path, browser: Browser) -> None:
    browser.open((site / "index.html").as_uri(), width=DESK)
    toggle = "[...document.querySelectorAll('form[data-md-component=palette] label')]"
    press = f"{toggle}.find((label) => !label.hidden).click()"
    browser.js(press)  # from the system's colours to light
    browser.js(press)  # to dark
    assert lightness(browser) < 0.3
    browser.open((site / "muon.html").as_uri(), width=DESK)
    assert lightness(browser) < 0.3
    browser.js("localStorage.clear()")
