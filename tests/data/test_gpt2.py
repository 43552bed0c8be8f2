"""GPT-2's files: checked wherever they come from, and a sentence where they cannot be had."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from speedrun.data.gpt2 import PublicFile
from speedrun.data.tokenizer import create_tokenizer, load_gpt2, parse_spec
from speedrun.errors import DataError
from tests.data.test_tokenizer import BPE, TEXTS, public_pair


def test_gpt2_files_are_checked_by_hash(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no vocab\.bpe or merges\.txt: download https"):
        load_gpt2(tmp_path)
    merges, vocabulary = public_pair(BPE, tmp_path)
    with pytest.raises(DataError, match=r"vocab\.bpe is not the public GPT-2 file"):
        load_gpt2(tmp_path)
    data = bytearray((tmp_path / "encoder.json").read_bytes())
    data[100] ^= 1
    (tmp_path / "encoder.json").write_bytes(data)
    with pytest.raises(DataError, match=r"encoder\.json is not the public GPT-2 file"):
        load_gpt2(tmp_path, merges, vocabulary)


def test_gpt2_without_network_or_files_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(DataError, match="use gpt2:FOLDER"):
        create_tokenizer(parse_spec("gpt2"), [])


def test_gpt2_comes_from_the_cache_of_tiktoken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = public_pair(BPE, tmp_path)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    cached = []
    for file in files:
        file = file._replace(url=f"http://127.0.0.1:9/{file.names[0]}")
        name = hashlib.sha1(file.url.encode()).hexdigest()
        (tmp_path / "cache" / name).write_bytes((tmp_path / file.names[0]).read_bytes())
        cached.append(file)
    assert np.array_equal(load_gpt2(None, *cached).encode(TEXTS[0]), BPE.encode(TEXTS[0]))


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """A server's address, and what it is asked for; of what it does not have it never speaks."""
    asked: list[str] = []
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix("/")
            asked.append(name)
            if name not in files:
                over.wait()
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(files[name])))
            self.end_headers()
            self.wfile.write(files[name])

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", asked
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def at(files: tuple[PublicFile, PublicFile], address: str) -> list[PublicFile]:
    return [file._replace(url=address + file.names[0]) for file in files]


@pytest.mark.parametrize("cache", ["cache", ""])
def test_gpt2_is_fetched_once_where_there_is_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / cache) if cache else "")
    pair = public_pair(BPE, tmp_path)
    with serving({f.names[0]: (tmp_path / f.names[0]).read_bytes() for f in pair}) as served:
        address, asked = served
        for _ in range(2):
            fetched = load_gpt2(None, *at(pair, address))
            assert np.array_equal(fetched.encode(TEXTS[0]), BPE.encode(TEXTS[0]))
    assert asked == ["vocab.bpe", "encoder.json"] * (1 if cache else 2)


def test_gpt2_that_arrives_damaged_or_never_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("speedrun.data.gpt2.TIMEOUT_SECONDS", 0.2)
    pair = public_pair(BPE, tmp_path)
    with serving({"vocab.bpe": b"something else"}) as (address, _):
        with pytest.raises(DataError, match=r"another SHA-256.*use gpt2:FOLDER"):
            load_gpt2(None, *at(pair, address))
        with pytest.raises(DataError, match=r"timed out.*use gpt2:FOLDER") as caught:
            load_gpt2(None, *at(pair, address + "none/"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()
