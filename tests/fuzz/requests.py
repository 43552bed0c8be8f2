"""Requests to the two servers, on sockets: broken lines, headers, bodies, and JSON of every shape.

A request that is HTTP gets an answer, in the 400s with a sentence where it is refused; one that is
not may be hung up on. The server says nothing of its own, lives on, and ends when it is told to.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from speedrun.cli import main
from tests.fuzz.mutate import as_json, spoil_bytes, spoil_lines, spoil_value, text, value
from tests.fuzz.outcome import TRACEBACK, Outcome, cause, short
from tests.fuzz.world import World, copied

PATIENCE = 20.0
# What uvicorn says of what is no HTTP, or asks for another protocol.
QUIET = ("WARNING:  Invalid HTTP", "WARNING:  Unsupported upgrade", "WARNING:  No supported Web")


ODD_HEADERS = (
    b"Transfer-Encoding: chunked", b"Content-Length: 5", b"Content-Length: -1",
    b"Content-Length: 99999999999999999999", b"X: " + b"a" * 70_000, b"Host: evil.example",
    b"Origin: http://evil.example", b"Expect: 100-continue", b": x", b"X\0: y", b"X: \xff",
    b"Upgrade: websocket\r\nConnection: upgrade", b"\tfolded",
)  # fmt: skip
ODD_LINES = (
    b"GET / HTTP/9.9", b"GET", b"", b"\0\0\0", b"GET http://evil.example/ HTTP/1.1",
    b"POST * HTTP/1.1", b"GET /" + b"a" * 70_000 + b" HTTP/1.1", b"GET /%00%ff/../.. HTTP/1.0",
    b"GET /\xff HTTP/1.1", b"PRI * HTTP/2.0", b"DELETE /v1/models HTTP/1.1", b"get / http/1.1",
    b"GET /v1/models/%2e%2e HTTP/1.1", b"HEAD /v1/models HTTP/1.1",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    data: bytes
    whole: bool  # as HTTP wants it, so that an answer is due


def a_request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    named = {
        "Host": "127.0.0.1",
        "Connection": "close",
        "Content-Length": str(len(body)),
        **headers,
    }
    lines = "".join(f"{name.replace('_', '-')}: {said}\r\n" for name, said in named.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


def spoilt_request(rng: Random, honest: bytes) -> Request:
    """Its bytes, its lines, or its way of saying how long it is."""
    how = rng.randrange(6)
    head, _, body = honest.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    if how <= 1:
        return Request(spoil_bytes(rng, honest), whole=False)
    if how == 2:
        lines.insert(rng.randrange(1, len(lines) + 1), rng.choice(ODD_HEADERS))
    elif how == 3:
        lines[0] = rng.choice(ODD_LINES)
    elif how == 4:
        size = rng.choice((b"%x" % len(body), b"ffffffffffffffff", b"-1", b"zz", b"0", b"5;a=b"))
        lines = [line for line in lines if not line.startswith(b"Content-Length")]
        lines.append(b"Transfer-Encoding: chunked")
        body = size + b"\r\n" + body + b"\r\n" + rng.choice((b"0\r\n\r\n", b"", b"0\r\n", b"x\r\n"))
    else:
        lines = rng.sample(lines, len(lines))
    return Request(b"\r\n".join(lines) + b"\r\n\r\n" + body, whole=False)


@dataclass
class Served:
    """A server in a process of its own, asked over and over."""

    world: World
    honest: Callable[[Random], bytes]
    port: int
    pid: int
    heard: Path
    watched: Path
    healthy: str

    def make(self, rng: Random, folder: Path) -> Request:
        honest = self.honest(rng)
        request = Request(honest, whole=True) if rng.random() < 0.7 else spoilt_request(rng, honest)
        (folder / "request").write_bytes(request.data)
        if rng.random() < 0.1:  # what a live page reads while it is written
            file = self.watched / rng.choice(("metrics.jsonl", "summary.json", "environment.json"))
            whole = (self.world.runs[0] / file.name).read_bytes()
            (folder / file.name).write_bytes(
                spoil_lines(rng, whole) if rng.random() < 0.7 else whole
            )
        return request

    def judge(self, made: Request, folder: Path) -> Outcome:
        for file in folder.glob("*.json*"):
            file.replace(self.watched / file.name)
        wrong, status = self._answer(made)
        if not wrong and not made.whole:
            wrong = self._health()
        said = [
            line for line in self.heard.read_text(errors="replace").splitlines() if line.strip()
        ]
        said = [line for line in said if not line.startswith(QUIET)]
        if said:
            self.heard.write_bytes(b"")
            trace = "\n".join(said)
            what = cause(trace) if TRACEBACK in trace else said[0][:80]
            wrong = f"the server said {what}\n{trace[-3000:]}"
        if wrong:
            return Outcome("fault", f"{wrong}\n{short(ascii(made.data), 1200)}")
        return Outcome("result" if status < 400 else "sentence")

    def _answer(self, made: Request) -> tuple[str, int]:
        answer = b""
        try:
            with socket.create_connection(("127.0.0.1", self.port), PATIENCE) as client:
                client.settimeout(PATIENCE)
                try:
                    client.sendall(made.data)
                    if not made.whole:
                        client.shutdown(socket.SHUT_WR)
                    while piece := client.recv(1 << 16):
                        answer += piece
                except TimeoutError:
                    raise
                except OSError:
                    pass  # it hung up on what is no HTTP
        except TimeoutError:
            return "no answer in time", 0
        except OSError as error:
            return f"the server is gone: {error}", 0
        found = re.match(rb"HTTP/1\.[01] (\d{3}) ", answer)
        if not found:
            return ("no answer to a whole request" if made.whole else ""), 400
        status = int(found.group(1))
        if status >= 500 and status != 503:  # the live page: a file is being written
            return f"status {status}", status
        body = answer.partition(b"\r\n\r\n")[2]
        if made.whole and status >= 400 and not _is_sentence(body):
            return f"status {status} without a sentence", status
        return "", status

    def _health(self) -> str:
        wrong, status = self._answer(Request(a_request("GET", self.healthy), whole=True))
        return wrong or ("" if status in (200, 503) else f"not healthy after it: {status}")


def _is_sentence(body: bytes) -> bool:
    if not body.startswith(b"{"):
        return 0 < len(body) < 2000 and body.count(b"\n") <= 1
    said = json.loads(body)["error"]["message"]
    return isinstance(said, str) and 0 < len(said) < 2000 and "\n" not in said


@dataclass(frozen=True)
class Servers:
    name: str
    share: float
    world: World
    words: tuple[str, ...]
    honest: Callable[[Random], bytes]
    healthy: str
    batch: int = 400

    @contextmanager
    def session(self, scratch: Path) -> Iterator[Served]:
        run, heard, out = (
            copied(self.world.runs[0], scratch / "run0"),
            scratch / "stderr",
            scratch / "stdout",
        )
        pid = os.fork()
        if pid == 0:
            for number, path in ((1, out), (2, heard)):
                os.dup2(os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND), number)
            os.chdir(scratch)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may ignore
            code, sys.argv = 1, ["speedrun", *self.words]
            try:
                main()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            finally:
                sys.stderr.flush()
                os._exit(code)
        try:
            served = Served(self.world, self.honest, _port(out), pid, heard, run, self.healthy)
            yield served
        finally:
            code = _ended(pid)
        assert code in (0, 130), f"the server ended with {code}: {heard.read_text()[-500:]}"


def _ended(pid: int) -> int:
    """The exit code of a server that is told to end."""
    os.kill(pid, signal.SIGINT)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _port(out: Path) -> int:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = re.search(r"http://[^:]+:(\d+)/", out.read_text() if out.exists() else "")
        if found:
            return int(found.group(1))
        time.sleep(0.02)
    raise AssertionError("the server does not say where it is")


COMPLETION: dict[str, Any] = {
    "model": "run0", "prompt": "1 + ", "max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "n": 1,
    "stream": False, "logprobs": 2, "echo": False, "stop": ["x"], "seed": 3, "user": "me",
    "top_k": 5, "repetition_penalty": 1.1, "show_context": False, "best_of": 1,
    "frequency_penalty": 0.0, "logit_bias": {}, "suffix": "",
    "stream_options": {"include_usage": True},
}  # fmt: skip
PATHS = (
    "/", "/page.js", "/v1/models", "/v1/models/run0", "/v1/models/" + "%41" * 50, "/x%00",
    "/v1//models", "/v1/chat/completions", "/?a=" + "b" * 3000, "/v1/models/%ff%fe",
    "/v1/models/a%0ab",
)  # fmt: skip


def completion(rng: Random) -> bytes:
    """A call with some of its values spoilt, or another request that is HTTP."""
    kind = rng.randrange(10)
    if kind == 0:
        return a_request(
            rng.choice(("GET", "GET", "POST", "PUT", "OPTIONS", "HEAD2")), rng.choice(PATHS)
        )
    names = rng.sample(list(COMPLETION), rng.randrange(len(COMPLETION)))
    asked: Any = {"model": "run0", "max_tokens": 2} | {name: COMPLETION[name] for name in names}
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        asked = spoil_value(rng, asked)
    if isinstance(asked, dict) and rng.random() < 0.5:  # most values beside an honest rest
        asked |= {rng.choice(list(COMPLETION)): value(rng), "model": "run0"}
    body = as_json(rng, asked) if kind < 8 else spoil_bytes(rng, as_json(rng, asked))
    content = "application/json" if rng.random() < 0.97 else "text/plain"
    return a_request("POST", "/v1/completions", body, Content_Type=content)


def looking(rng: Random) -> bytes:
    path = rng.choice(("/", "/data.json", "/data.json", "/x", "//", "/data.json?x", "/%2e%2e/"))
    said = text(rng).encode("ascii", "replace").decode()
    known = re.sub(r"[^ -~]", "?", said)[:200] if rng.random() < 0.3 else "none"
    return a_request(rng.choice(("GET", "GET", "GET", "POST", "HEAD2")), path, If_None_Match=known)


def requests(world: World) -> list[Servers]:
    watch = ("report", "run0", "--watch", "--port", "0")
    return [
        Servers("serve", 1.2, world, ("serve", "run0", "--port", "0"), completion, "/v1/models"),
        Servers("watch", 0.8, world, watch, looking, "/data.json", batch=200),
    ]
