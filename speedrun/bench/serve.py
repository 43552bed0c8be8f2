"""Serving: tokens per second of one client and of eight, as they see them.

The server is a process of its own, the clients are threads of this one, each with one request after
the other on a connection; both have this machine's cores between them. A request asks for a text of
some length after a short prompt, whole or as a stream. The weights are those of a first step: what
they are makes no difference to the time, but that a text may end early is counted.
"""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from speedrun.bench.timing import Figures, take_turns
from speedrun.errors import RunError

CLIENTS = 8
PROMPT = "def main("


@contextmanager
def serving(run: Path) -> Iterator[int]:
    """The port of a server of a run."""
    words = [sys.executable, "-m", "speedrun", "serve", str(run), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = ""
            while (found := re.search(r"http://[^:]+:(\d+)/\n", said)) is None:
                line = process.stdout.readline()
                if not line:
                    raise RunError(f"the server did not start: {said}")
                said += line
            yield int(found.group(1))
        finally:
            process.send_signal(signal.SIGINT)


def train_one_step(run: Path, recipe: str, overrides: Sequence[str]) -> None:
    words = ["train", recipe, "--track", "nano", "--stop-after", "1", "--run", str(run)]
    command = [sys.executable, "-m", "speedrun", *words, "--sample-tokens", "0", *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"the run to serve could not be made: {done.stderr.strip()[-500:]}")


class Clients:
    """Requests, and how many tokens they were given."""

    def __init__(self, port: int, tokens: int, requests: int) -> None:
        self._port, self._tokens, self._requests = port, tokens, requests
        self.given: dict[str, list[int]] = {}

    def run(self, name: str, clients: int, *, stream: bool) -> None:
        """Each client's requests, all clients at the same time."""
        with ThreadPoolExecutor(clients) as pool:
            given = pool.map(partial(self._client, stream=stream), range(clients))
            self.given.setdefault(name, []).append(sum(given))

    def _client(self, client: int, *, stream: bool) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        given = 0
        for request in range(self._requests):
            body = {
                "model": "run", "prompt": PROMPT, "max_tokens": self._tokens, "stream": stream,
                "seed": client * self._requests + request,
            }  # fmt: skip
            body |= {"stream_options": {"include_usage": True}} if stream else {}
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse().read()
            if stream:
                answer = answer.split(b"\n\n")[-3].removeprefix(b"data: ")
            given += json.loads(answer)["usage"]["completion_tokens"]
        connection.close()
        return given


def measure_serve(
    turns: int = 7,
    recipe: str = "best",
    overrides: Sequence[str] = (),
    tokens: int = 128,
    requests: int = 6,
) -> Figures:
    figures: Figures = {"clients": CLIENTS, "tokens_asked_for": tokens, "prompt": PROMPT}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train_one_step(run, recipe, overrides)
        with serving(run) as port:
            clients = Clients(port, tokens, requests)
            rivals = {
                f"{count}{how}": partial(clients.run, f"{count}{how}", count, stream=bool(how))
                for count in (1, CLIENTS)
                for how in ("", "_streamed")
            }
            seconds = take_turns(rivals, turns)
    for how in ("", "_streamed"):
        speed = {
            count: clients.given[f"{count}{how}"][-1] / seconds[f"{count}{how}"]
            for count in (1, CLIENTS)
        }
        figures[f"tokens_per_second_of_one{how}"] = speed[1]
        figures[f"tokens_per_second_of_eight{how}"] = speed[CLIENTS]
        figures[f"speedup_of_eight{how}"] = speed[CLIENTS] / speed[1]
    return figures
