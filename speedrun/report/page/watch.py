"""The page, live: a read-only server on the loopback interface that re-reads the folders.

GET / is the page and GET /data.json its data, with an entity tag made of file sizes and times, so
that an idle page costs a few stat calls. Requests that name another host are refused: a web page
elsewhere cannot reach in through a name that resolves to 127.0.0.1.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from speedrun.errors import ConfigError, SpeedrunError
from speedrun.report.page.build import page_data, render
from speedrun.report.page.inputs import read_inputs

HOST = "127.0.0.1"
WATCHED = ("config.toml", "metrics.jsonl", "summary.json", "environment.json")


class Source:
    """Page data of some paths, rebuilt only when a file under them has changed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._lock = Lock()
        self._tag = ""
        self._data: dict[str, Any] = {}

    def get(self) -> tuple[str, dict[str, Any]]:
        with self._lock:
            inputs = read_inputs(self._paths)
            marks = []
            files = [run.path / name for run in inputs.runs for name in WATCHED]
            for file in (*files, *inputs.files):
                if file.exists():
                    state = file.stat()
                    marks.append(f"{file} {state.st_size} {state.st_mtime_ns}")
            tag = f'"{hashlib.sha256(chr(10).join(marks).encode()).hexdigest()[:16]}"'
            if tag != self._tag:
                self._data = page_data(inputs.runs, inputs.race, inputs.ablation, inputs.tuning,
                                       live=True)  # fmt: skip
                self._tag = tag
            return self._tag, self._data


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, source: Source, port: int) -> None:
        self.source = source
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"--port {port} cannot be used: {error.strerror}; choose another, or 0 for any"
            ) from None

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = "speedrun"
    sys_version = ""

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        if host not in (HOST, "localhost"):
            self._send(403, "text/plain", b"this server answers to 127.0.0.1 only\n")
            return
        if self.path not in ("/", "/data.json"):
            self._send(404, "text/plain", b"there is / and /data.json\n")
            return
        try:
            tag, data = self.server.source.get()
        except SpeedrunError as error:  # a file half-written this instant; the page asks again
            self._send(503, "text/plain", f"{error}\n".encode())
            return
        if self.headers.get("If-None-Match") == tag:
            self._send(304, "text/plain", b"", tag)
        elif self.path == "/":
            self._send(200, "text/html", render(data).encode(), tag)
        else:
            body = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
            self._send(200, "application/json", body, tag)

    def do_HEAD(self) -> None:
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, _: str | None = None) -> None:
        """What http.server itself refuses: a method, or what is no HTTP."""
        if code == HTTPStatus.NOT_IMPLEMENTED:  # of this server it is no fault
            code, message = HTTPStatus.METHOD_NOT_ALLOWED, "this server answers GET and HEAD only"
        said = message or HTTPStatus(code).phrase
        self.close_connection = True
        self._send(code, "text/plain", f"{said[:200]}\n".encode(errors="replace"))

    def _send(self, code: int, kind: str, body: bytes, tag: str = "") -> None:
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: one line a poll would bury everything else in the terminal."""
