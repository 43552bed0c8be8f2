"""`speedrun serve` as its clients meet it: answers, bad requests, many at once, and its end."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.types import ASGIApp

from speedrun.config.resolve import resolve
from speedrun.errors import ConfigError
from speedrun.serve.load import load_run
from speedrun.serve.sampling import Sampling
from speedrun.serve.server.app import Served as Run
from speedrun.serve.server.app import Server, hosts_of
from speedrun.serve.server.engine import BusyError, Engine, TextError, Worker
from speedrun.serve.writing import Wanted, Writer, prompt_ids, write
from tests.conftest import TINY
from tests.serve.loaded import loaded
from tests.serve.served import Served, serving
from tests.train.heard import Make, train
from tests.waiting import wait_for

ASK = {"model": "one", "prompt": "1 + ", "max_tokens": 20, "seed": 3}


@pytest.fixture(scope="module")
def runs(tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = []
    for name, recipe in (("one", "modern"), ("two", "baseline")):
        config = resolve(recipe, "nano", [*TINY, f"data.dir={tiny_dataset}"]).config
        made.append(tmp_path_factory.mktemp("runs") / name)
        train(config, made[-1])
    return made


@pytest.fixture(scope="module")
def server(runs: list[Path]) -> Iterator[Served]:
    with serving(runs) as served:
        yield served


def expected(run: Path, sampling: Sampling) -> tuple[str, int, str | None]:
    """What the library itself writes: text, tokens, and why it ended."""
    one = load_run(run)
    wanted = Wanted(prompt_ids(one.tokenizer, "1 + "), 20, sampling)
    pieces = [piece for _, piece in write(Writer(one), [wanted])]
    return "".join(piece.text for piece in pieces), len(pieces), pieces[-1].finish


def test_runs_are_listed_with_what_they_are(server: Served) -> None:
    status, body, _ = server.request("GET", "/v1/models")
    first, second = json.loads(body)["data"]
    assert (status, first["id"], second["id"]) == (200, "one", "two")
    assert (first["recipe"], second["recipe"], first["context"]) == ("modern", "baseline", 64)
    assert json.loads(server.request("GET", "/v1/models/two")[1])["object"] == "model"
    assert server.request("GET", "/v1/models/three")[0] == 404


def test_a_completion_is_what_the_library_writes(server: Served, runs: list[Path]) -> None:
    for run, name in zip(runs, ("one", "two"), strict=True):
        status, found = server.ask(**{**ASK, "model": name})
        text, tokens, finish = expected(run, Sampling(temperature=1.0, top_k=0, seed=3))
        assert (status, found["object"]) == (200, "text_completion")
        assert found["choices"] == [
            {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        ]
        usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
        assert found["usage"] == usage
    assert server.ask(**ASK)[1]["choices"] == server.ask(**ASK)[1]["choices"]
    free = [server.ask(**{**ASK, "seed": None})[1]["choices"][0]["text"] for _ in range(3)]
    assert len(set(free)) > 1, "without a seed texts differ"


def test_a_stream_adds_up_to_the_whole(server: Served) -> None:
    asked = {**ASK, "prompt": ["1 + ", "2"], "n": 2, "logprobs": 2, "stop": ["7"]}
    _, whole = server.ask(**asked)
    events = server.events(**asked, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    for choice in whole["choices"]:
        parts = [part for e in events for part in e["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [
            choice["finish_reason"]
        ]
        for key, values in choice["logprobs"].items():
            assert [x for part in parts for x in part["logprobs"][key]] == values
            assert len(values) == len(choice["logprobs"]["tokens"])


def test_options_reach_the_draw(server: Served, runs: list[Path]) -> None:
    options: dict[str, Any] = {
        "temperature": 0.7, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2,
    }  # fmt: skip
    text, *_ = expected(runs[0], Sampling(**options, seed=3))
    assert server.ask(**ASK, **options)[1]["choices"][0]["text"] == text
    assert server.ask(**ASK, echo=True)[1]["choices"][0]["text"].startswith("1 + ")
    ids = prompt_ids(load_run(runs[0]).tokenizer, "1 + ")
    by_ids = server.ask(**{**ASK, "prompt": ids})[1]["choices"][0]["text"]
    assert by_ids == server.ask(**ASK)[1]["choices"][0]["text"]


def test_what_the_last_token_saw(server: Served) -> None:
    _, found = server.ask(**{**ASK, "prompt": "1<|endoftext|>2", "show_context": True})
    context = found["choices"][0]["context"]
    assert context["documents"] == [0, 2]
    assert len(context["bytes"]) == 4 + found["usage"]["completion_tokens"]
    assert bytes(b for token in context["bytes"][:4] for b in token) == b"12"
    assert context["first_seen"] == context["first_remembered"] == 0
    # Texts are of chance: some of ten are longer than the 64 tokens that are remembered.
    _, long = server.ask(**{**ASK, "max_tokens": 100, "n": 10, "show_context": True})
    seen = [choice["context"] for choice in long["choices"]]
    assert all((one["first_remembered"] > 0) == (len(one["bytes"]) > 65) for one in seen)
    assert any(one["first_remembered"] > 0 for one in seen)


JSON = "application/json"
BAD: list[tuple[str, bytes, int, str]] = [
    ("no JSON", b"{", 400, "not JSON"),
    ("not UTF-8", b'{"model": "\xff"}', 400, "not JSON"),
    ("a number that is none", b'{"model": "one", "temperature": NaN}', 400, "NaN is not a number"),
    ("no object", b"[]", 400, "JSON object"),
    ("nested", b'{"prompt": ' + b"[" * 200_000, 400, "nested too deeply"),
    ("a huge number", b'{"seed": ' + b"9" * 10_000 + b"}", 400, "not JSON"),
    ("no model", b'{"prompt": "a"}', 400, "model: it is missing"),
    ("another model", b'{"model": "three"}', 404, "no model 'three' here, only one, two"),
    ("an unknown key", b'{"model": "one", "tempreature": 1}', 400, "tempreature: it is not known"),
    ("no tokens", b'{"model": "one", "max_tokens": 0}', 400, "max_tokens"),
    ("many tokens", b'{"model": "one", "max_tokens": 1000000}', 400, "max_tokens"),
    ("cold", b'{"model": "one", "temperature": -1}', 400, "temperature"),
    ("a share above 1", b'{"model": "one", "top_p": 1.5}', 400, "top_p"),
    ("many texts", b'{"model": "one", "n": 65}', 400, "n:"),
    ("many prompts", b'{"model": "one", "n": 9, "prompt": ["a","b","c","d","e","f","g","h"]}', 400,
     "64 texts"),
    ("a wrong prompt", b'{"model": "one", "prompt": {"a": 1}}', 400, "prompt: it is a text"),
    ("mixed prompts", b'{"model": "one", "prompt": ["a", 1]}', 400, "prompt: it is a text"),
    ("ids out of range", b'{"model": "one", "prompt": [5, 257]}', 400, "token ids are 0 to 256"),
    ("half a character", b'{"model": "one", "prompt": "\\ud800"}', 400, "surrogate"),
    ("a long prompt", b'{"model": "one", "prompt": "' + b"a" * 64 + b'"}', 400, "context holds 64"),
    ("a huge prompt", b'{"model": "one", "prompt": "' + b"a" * 900_000 + b'"}', 400, "shorten it"),
    ("a long stop", b'{"model": "one", "stop": "' + b"a" * 300 + b'"}', 400, "stop takes"),
    ("logit_bias", b'{"model": "one", "logit_bias": {"1": 5}}', 400, "logit_bias is not supported"),
    ("presence", b'{"model": "one", "presence_penalty": 1}', 400, "use repetition_penalty"),
    ("best_of", b'{"model": "one", "best_of": 4}', 400, "best_of"),
    ("echoed odds", b'{"model": "one", "echo": true, "logprobs": 1}', 400, "leave one out"),
    ("an odd key", b'{"model": "one", "a\\r\\n\\u001b": 1}', 400, r"'a\r\n\x1b': it is not known"),
    ("too large", b" " * (1 << 20) + b"{}", 413, "1,048,576 bytes at most"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "said"), [x[1:] for x in BAD], ids=[x[0] for x in BAD])
def test_a_bad_request_is_one_sentence(server: Served, body: bytes, status: int, said: str) -> None:
    found_status, found, _ = server.request("POST", "/v1/completions", body, content_type=JSON)
    error = json.loads(found)["error"]
    assert (found_status, set(error)) == (status, {"message", "type", "param", "code"})
    assert said in error["message"]
    assert len(error["message"]) < 400
    assert server.ask(**ASK)[0] == 200, "the next request is answered"


def test_other_paths_and_methods(server: Served) -> None:
    for method, path, status in (
        ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405), ("GET", "/nothing", 404),
        ("GET", "/../page.js", 404), ("POST", "/v1/chat/completions", 404),
    ):  # fmt: skip
        found, body, _ = server.request(method, path)
        assert found == status, path
        assert json.loads(body)["error"]["message"]
    assert server.request("POST", "/v1/completions", b"{}", content_type="text/plain")[0] == 415


def test_requests_of_other_sites_are_turned_away(server: Served) -> None:
    for name in ("evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "", "[::1"):
        status, body, _ = server.request("GET", "/v1/models", host=name)
        assert status in (400, 403), name
        assert b"best" not in body
    for name in ("localhost", "127.0.0.1:99", "[::1]:8000", "LOCALHOST"):
        assert server.request("GET", "/v1/models", host=name)[0] == 200, name
    assert server.request("GET", "/v1/models", origin="https://evil.example")[0] == 403
    assert server.request("GET", "/v1/models", origin="null")[0] == 403
    assert server.request("GET", "/v1/models", origin=server.address)[0] == 200


def test_the_page_allows_nothing_from_elsewhere(server: Served) -> None:
    status, _, headers = server.request("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'self'" in headers["content-security-policy"]


def test_connections_made_to_hurt(server: Served) -> None:
    """Garbage, half a request, a body that never comes, a client that hangs up in the middle."""
    long = json.dumps({**ASK, "max_tokens": 8000, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    waiting = []
    for data in (
        b"\x16\x03\x01\x00\xff" * 50, b"GET / HTTP/1.1\r\nhost: localh", b"G" * 100_000,
        head + b"content-length: 1000\r\n\r\n{", head + b"content-length: -1\r\n\r\n{}",
        head + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        head + b"content-length: %d\r\n\r\n" % len(long) + long,
    ):  # fmt: skip
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        connection.sendall(data)
        waiting.append(connection)
    assert waiting[-1].recv(100).startswith(b"HTTP/1.1 200")
    assert server.ask(**ASK)[0] == 200, "while they are there"
    for connection in waiting:
        connection.close()
    assert server.ask(**ASK)[0] == 200, "and when they are gone"


@pytest.mark.slow
def test_two_hundred_at_once_and_none_is_lost(server: Served) -> None:
    """Memory after some rounds of them is what it was after the first."""
    bodies = [{**ASK, "model": ("one", "two")[i % 2], "seed": i} for i in range(200)]
    alone = [server.ask(**body)[1]["choices"] for body in bodies[:20]]
    sizes = []
    for _ in range(4):
        with ThreadPoolExecutor(200) as pool:
            found = list(pool.map(lambda body: server.ask(**body), bodies))
        assert [status for status, _ in found] == [200] * 200
        assert [answer["choices"] for _, answer in found[:20]] == alone
        assert all(answer["choices"][0]["finish_reason"] for _, answer in found)
        sizes.append(psutil.Process(server.process.pid).memory_info().rss)
    assert sizes[-1] < sizes[0] + (30 << 20), sizes


def test_a_client_that_goes_makes_room(runs: list[Path]) -> None:
    with serving(runs[:1], "--slots", "1", "--queue", "63") as server:
        body = json.dumps({**ASK, "max_tokens": 8192, "n": 64, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        connection.sendall(head + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
        connection.close()
        wait_for(lambda: server.ask(**ASK)[0] == 200, "a place in the queue")
    assert server.process.returncode == 130, "Ctrl-C ends it"


async def answered(
    app: ASGIApp, body: dict[str, Any], *, gone: bool = False
) -> tuple[int, dict[str, str], Any]:
    """A request to the application itself, without a server between; gone: in the midst of it."""
    sent: list[Any] = []
    come = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": gone}])
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"",
             "query_string": b"", "headers": headers, "http_version": "1.1"}  # fmt: skip

    async def receive() -> Any:
        for message in come:
            return message
        return {"type": "http.disconnect"} if gone else await asyncio.Future()  # or it stays

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    named = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
    return sent[0]["status"], named, json.loads(sent[1]["body"] or "null")


def test_a_client_that_goes_in_the_midst_of_its_request_is_no_fault(tiny: Make) -> None:
    """The server's terminal had a traceback of it."""
    one = loaded(tiny())
    engine = Engine([Worker({"untrained": Writer(one, 1)})], 2)
    app = Server([Run("untrained", one, 64)], engine, hosts_of("localhost", [])).app
    assert asyncio.run(answered(app, {**ASK, "model": "untrained"}, gone=True))[0] == 499


@pytest.mark.parametrize(
    ("error", "gone"),
    [("handler is closed", True), ("handler is closed", False), ("another fault", True)],
)
def test_an_answer_to_a_client_that_has_just_gone_is_dropped(
    tiny: Make, error: str, gone: bool
) -> None:
    """As uvloop says it of a transport: another traceback on the server's terminal."""
    one = loaded(tiny())
    engine = Engine([Worker({"untrained": Writer(one, 1)})], 2)
    app = Server([Run("untrained", one, 64)], engine, hosts_of("localhost", [])).app
    scope = {"type": "http", "method": "GET", "path": "/v1/none", "raw_path": b"",
             "query_string": b"", "headers": [(b"host", b"localhost")]}  # fmt: skip

    async def send(_: Any) -> None:
        raise RuntimeError(f"unable to perform operation on <TCPTransport>; {error}")

    async def receive() -> Any:
        return {"type": "http.disconnect"} if gone else await asyncio.Future()

    async def ask() -> None:
        await app(scope, receive, send)

    if gone and "closed" in error:
        asyncio.run(ask())
    else:
        with pytest.raises(RuntimeError, match=error):
            asyncio.run(ask())


def test_a_full_queue_says_busy(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, go = loaded(tiny()), threading.Event()
    writer, body = Writer(one, 1), {**ASK, "model": "untrained"}
    step = writer.step
    monkeypatch.setattr(writer, "step", lambda: (go.wait(), step()))

    async def requests() -> None:
        engine = Engine([Worker({"untrained": writer})], 2)
        app = Server([Run("untrained", one, 64)], engine, hosts_of("localhost", [])).app
        engine.start()
        waiting = [asyncio.ensure_future(answered(app, {**body, "seed": n})) for n in range(2)]
        while engine.open_texts < 2:
            await asyncio.sleep(0.001)
        status, headers, said = await answered(app, body)
        assert (status, headers["retry-after"]) == (429, "1")
        assert "busy" in said["error"]["message"]
        assert said["error"]["type"] == "rate_limit_error"
        go.set()
        assert [(await one)[0] for one in waiting] == [200, 200], "none is lost"
        assert (await answered(app, body))[0] == 200
        status, _, said = await answered(app, {**body, "n": 3})
        assert (status, "2 texts at most" in said["error"]["message"]) == (400, True)
        engine.stop()

    asyncio.run(requests())


def test_another_name_and_two_runs_of_one_name(runs: list[Path], tmp_path: Path) -> None:
    from speedrun.commands.serve import serve_command

    with serving(runs[:1], "--allow-host", "my.machine") as server:
        assert server.request("GET", "/v1/models", host="my.machine:80")[0] == 200
        taken = server.port
        words: dict[str, Any] = {
            "host": "127.0.0.1", "allow_hosts": [], "slots": 1, "queue": 1, "context": 0,
        }  # fmt: skip
        with pytest.raises(ConfigError, match="choose another --port"):
            serve_command(runs[:1], port=taken, **words)
    with pytest.raises(ConfigError, match="two runs are called 'one'"):
        serve_command([runs[0], runs[0]], port=0, **words)


def test_a_fault_ends_the_texts_that_met_it_and_no_other(
    tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = loaded(tiny())
    writer = Writer(one, 2)
    wanted = Wanted(prompt_ids(one.tokenizer, "1"), 5, Sampling())
    step, faults = writer.slots.write, [ZeroDivisionError("the test says so")]

    def faulty(texts: Any) -> Any:
        if faults:
            raise faults.pop()
        return step(texts)

    monkeypatch.setattr(writer.slots, "write", faulty)

    async def requests() -> None:
        engine = Engine([Worker({"one": writer})], 3)
        engine.start()
        first, second = engine.ask("one", [wanted, wanted], whole=True)
        with pytest.raises(BusyError):
            engine.ask("one", [wanted, wanted], whole=True)
        with pytest.raises(TextError, match="the test says so"):
            await first.pieces()
        with suppress(TextError):  # it was begun in the same step, or after it
            assert len(await second.pieces()) == 5
        later, = engine.ask("one", [wanted], whole=True)  # fmt: skip
        assert len(await later.pieces()) == 5
        assert engine.open_texts == 0
        engine.stop()

    asyncio.run(requests())
