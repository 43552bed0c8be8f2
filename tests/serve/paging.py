"""The page of `speedrun serve` as a test uses it: opened, filled in, read and judged."""

from __future__ import annotations

import json

from tests.report.browser import Browser
from tests.serve.served import Served

DONE = "document.querySelector('#stop').hidden && document.querySelector('.token') !== null"
TOKENS = "[...document.querySelectorAll('.token')]"
CARD = "document.querySelector('#card:not([hidden])')"


def opened(browser: Browser, server: Served, *, width: int = 1200, dark: bool = False) -> Browser:
    """The page as nobody has used it yet."""
    browser.js("if (location.protocol === 'http:') {"
               "localStorage.clear(); onpagehide = () => sessionStorage.clear(); }")  # fmt: skip
    browser.open(server.address, width=width, dark=dark, offline=False)
    browser.until("document.querySelectorAll('.output').length === 2")
    return browser


def fill(page: Browser, **fields: str | int | float) -> None:
    for name, value in fields.items():
        page.js(f"""(() => {{
          const field = document.getElementById({name.replace("__", "-")!r});
          field.value = {json.dumps(str(value))};
          field.dispatchEvent(new Event("input"));
        }})()""")


def write(page: Browser, prompt: str, **fields: str | int | float) -> None:
    fill(page, prompt=prompt, **fields)
    page.js("document.querySelector('#write').click()")
    page.until(DONE)


def texts(page: Browser, of: str) -> list[str]:
    found: list[str] = page.js(f"[...document.querySelectorAll({of!r})].map(e => e.textContent)")
    return found


# Of every text that is shown, how far its colour is from what is painted behind it.
CONTRASTS = """(() => {
  const pixel = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const pen = pixel.getContext("2d", { willReadFrequently: true });
  const painted = (colours) => {
    for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
    const parts = [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => value / 255);
    const [r, g, b] = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].some((node) => node.data?.trim());
    const hidden = element.closest(".unseen, .skip, noscript, option, .alone h2, .alone .facts");
    if (!text || hidden || !element.getClientRects().length) continue;
    const behind = [];
    for (let at = element; at; at = at.parentElement) {
      behind.unshift(getComputedStyle(at).backgroundColor);
    }
    const [back, front] = [painted(behind), painted([...behind, getComputedStyle(element).color])];
    const ratio = (Math.max(back, front) + 0.05) / (Math.min(back, front) + 0.05);
    found.push([ratio, element.className + " " + element.textContent.slice(0, 30)]);
  }
  return found;
})()"""


def lightness(page: Browser) -> float:
    found: float = page.js(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3)"
        ".reduce((a, b) => a + Number(b), 0) / 765"
    )
    return found
