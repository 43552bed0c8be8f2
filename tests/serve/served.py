"""A server in a process of its own, and requests to it as a client makes them."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE


@dataclass(frozen=True)
class Served:
    port: int
    process: subprocess.Popen[str]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            found = answer.read()
            return answer.status, found, {k.lower(): v for k, v in answer.getheaders()}
        finally:
            connection.close()

    def ask(self, **values: Any) -> tuple[int, Any]:
        """A completion; gives the status and the object that was answered."""
        body = json.dumps(values).encode()
        status, found, _ = self.request(
            "POST", "/v1/completions", body, content_type="application/json"
        )
        return status, json.loads(found)

    def events(self, **values: Any) -> list[Any]:
        """A completion as it is streamed."""
        body = json.dumps({**values, "stream": True}).encode()
        status, found, headers = self.request(
            "POST", "/v1/completions", body, content_type="application/json"
        )
        assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
        *events, done, rest = found.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@contextmanager
def serving(runs: Sequence[Path], *words: str) -> Iterator[Served]:
    command = [sys.executable, "-m", "speedrun", "serve", *map(str, runs), "--port", "0", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = ""
        while "Ctrl-C ends it" not in said:
            line = process.stdout.readline()
            assert line, f"the server ended: {said}"
            said += line
        found = re.search(r"http://[^:]+:(\d+)/", said)
        assert found is not None
        yield Served(int(found.group(1)), process)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)
        if process.stdout is not None:
            process.stdout.close()
