"""Headless Chromium, driven through its debugging pipe."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE, wait_for

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
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
KEYS = {
    "ArrowRight": 39, "ArrowLeft": 37, "ArrowUp": 38, "ArrowDown": 40, "Home": 36, "End": 35,
    "Tab": 9, "Enter": 13, "Escape": 27,
}  # fmt: skip
CTRL, SHIFT = 2, 8


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

    def press(self, key: str, modifiers: int = 0) -> None:
        down = {"type": "rawKeyDown"}
        if key == "Enter" and not modifiers:  # which presses a button only as a character
            down = {"type": "keyDown", "text": "\r"}
        for how in (down, {"type": "keyUp"}):
            self.call("Input.dispatchKeyEvent", key=key, code=key, modifiers=modifiers,
                      windowsVirtualKeyCode=KEYS[key], **how)  # fmt: skip
        self.settle()

    def type(self, text: str) -> None:
        """Into whatever has the focus."""
        self.call("Input.insertText", text=text)
        self.settle()

    def point(self, element: str) -> None:
        """The mouse onto the first box of an element, which the expression gives."""
        place = f"""(() => {{
          const element = {element};
          element.scrollIntoView({{ block: "center" }});
          const box = element.getClientRects()[0];
          return [box.left + box.width / 2, box.top + box.height / 2];
        }})()"""
        x, y = self.js(place)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
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
