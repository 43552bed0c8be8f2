"""The live server: loopback only, read-only, and fresh after every change."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from speedrun.errors import ConfigError
from speedrun.report.page.watch import Server, Source
from speedrun.train.run import RunFolder
from tests.report.made import begun_run, made_config
from tests.waiting import PATIENCE


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return begun_run(tmp_path / "run", made_config())


@pytest.fixture
def server(run: RunFolder) -> Iterator[Server]:
    with Server(Source([run.path]), 0) as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield found
        found.shutdown()
        thread.join(10)


def ask(
    server: Server, path: str, method: str = "GET", **headers: str
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=PATIENCE)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.getheaders())


def test_page_and_data_follow_the_run(server: Server, run: RunFolder) -> None:
    code, page, headers = ask(server, "/")
    assert code == 200
    assert "connect-src 'self'" in page
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    code, text, headers = ask(server, "/data.json")
    assert json.loads(text)["live"] is True
    assert json.loads(text)["runs"][0]["val"]["loss"] == []
    tag = headers["ETag"]
    assert ask(server, "/data.json", **{"If-None-Match": tag})[:2] == (304, "")
    run.log("val", step=0, tokens=0, seconds=0.0, wall_seconds=1.0, loss=7.5, bits_per_byte=3.0)
    code, text, headers = ask(server, "/data.json", **{"If-None-Match": tag})
    assert code == 200
    assert headers["ETag"] != tag
    assert json.loads(text)["runs"][0]["val"]["loss"] == [7.5]


def test_only_this_machine_is_served_and_nothing_is_taken(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "/", Host="evil.example")[0] == 403
    assert ask(server, "/", Host="localhost:1")[0] == 200
    assert ask(server, "/../../etc/passwd")[0] == 404
    assert ask(server, "/", "POST")[0] == 405
    code, body, headers = ask(server, "/", "HEAD")
    assert (code, body) == (200, "")
    assert int(headers["Content-Length"]) > 1000


def test_a_moment_without_the_file_is_survived(server: Server, run: RunFolder) -> None:
    text = run.config.read_text()
    run.config.unlink()
    assert ask(server, "/data.json")[0] == 503
    run.config.write_text(text)
    assert ask(server, "/data.json")[0] == 200


def test_a_taken_port_is_refused(server: Server, run: RunFolder) -> None:
    with pytest.raises(ConfigError, match="--port"):
        Server(Source([run.path]), server.server_address[1])


def test_what_it_does_not_do_is_one_line(server: Server) -> None:
    for method in ("POST", "DELETE"):
        code, said, headers = ask(server, "/", method)
        assert (code, headers["Content-Type"]) == (405, "text/plain; charset=utf-8")
        assert said == "this server answers GET and HEAD only\n"
    with socket.create_connection(("127.0.0.1", server.server_address[1]), PATIENCE) as client:
        client.sendall(b"GET / HTTP/9.9\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer == b"Invalid HTTP version (9.9)\n"
