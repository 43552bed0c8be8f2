"""Downloads, from a local server that answers as the hub does."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from speedrun.data.download import REPOSITORIES, download
from speedrun.data.shards import Dataset, write_shard
from speedrun.errors import ConfigError, DataError, SpeedrunError

pytest.importorskip("huggingface_hub")
REPOSITORY = REPOSITORIES["fineweb10B"]
COMMIT = "0123456789" * 4
CHUNK = 1 << 14


class Hub(ThreadingHTTPServer):
    """One dataset repository: files by name, and how the next answers are to go wrong."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files: dict[str, bytes] = {}
        self.listed: dict[str, bytes] = {}  # what sizes and hashes are told of
        self.cut_after: list[int] = []  # the next bodies end after so many bytes
        self.requests: list[tuple[str, str]] = []  # file and Range header of each GET

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        if self.path == f"/api/datasets/{REPOSITORY}?blobs=true":
            return self.send(200, json.dumps(self.info()).encode(), {}, body)
        if path.startswith("/cdn/"):
            return self.send_file(path.removeprefix("/cdn/"), body)
        name = path.removeprefix(f"/datasets/{REPOSITORY}/resolve/{COMMIT}/")
        if name not in self.server.files:
            return self.send(404, b"", {"X-Error-Code": "RepoNotFound"}, body)
        listed = self.server.listed[name]
        headers = {
            "Location": f"{self.server.address}/cdn/{name}",
            "X-Repo-Commit": COMMIT,
            "X-Linked-Size": str(len(listed)),
            "X-Linked-Etag": f'"{hashlib.sha256(listed).hexdigest()}"',
        }
        return self.send(302, b"", headers, body)

    def info(self) -> dict[str, object]:
        siblings: list[dict[str, object]] = [{"rfilename": "README.md", "size": 3, "blobId": "1"}]
        for name, data in reversed(self.server.listed.items()):
            digest, size = hashlib.sha256(data).hexdigest(), len(data)
            lfs = {"sha256": digest, "size": size, "pointerSize": 134}
            siblings.append({"rfilename": name, "size": size, "blobId": "2", "lfs": lfs})
        return {"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}

    def send_file(self, name: str, body: bool) -> None:
        data = self.server.files[name]
        wanted = self.headers.get("Range", "")
        self.server.requests.append((name, wanted))
        match = re.fullmatch(r"bytes=(\d+)-", wanted)
        start = int(match[1]) if match else 0
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        if match:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.send(206 if match else 200, data[start:], headers, body)

    def send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if (
            body
            and status in (200, 206)
            and self.path.startswith("/cdn/")
            and self.server.cut_after
        ):
            self.wfile.write(data[: self.server.cut_after.pop(0)])
            self.close_connection = True
        elif body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    draw = np.random.default_rng(0)
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, 4))]
    for name in names:
        write_shard(tmp_path / "shard", draw.integers(0, 50257, 200_000).astype(np.uint16))
        server.files[name] = (tmp_path / "shard").read_bytes()
    (tmp_path / "shard").unlink()
    server.listed = dict(server.files)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    # The hub's client writes 10 MB at a time; these files are 0.4 MB.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", CHUNK)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_first_shards_arrive_and_make_a_dataset(tmp_path: Path, hub: Hub) -> None:
    seen: list[tuple[str, int, int]] = []
    out = download("fineweb10B", tmp_path / "out", 2, lambda *state: seen.append(state))
    names = ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert all((out / name).read_bytes() == hub.files[name] for name in names)
    assert seen[0] == ("fineweb_val_000000.bin", 0, seen[0][2])
    assert seen[-1] == (
        "fineweb_train_000002.bin",
        seen[0][2],
        sum(len(hub.files[n]) for n in names),
    )
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    dataset = Dataset.open(out)
    assert dataset.vocab_size == 50257
    assert dataset.split("train").tokens == 400_000
    hub.requests.clear()
    download("fineweb10B", out, 3)
    assert hub.requests == [("fineweb_train_000003.bin", "")], "fetched again what was there"


def test_a_cut_connection_goes_on_at_the_next_byte(tmp_path: Path, hub: Hub) -> None:
    hub.cut_after = [6 * CHUNK, 3 * CHUNK + 5]
    download("fineweb10B", tmp_path / "out", 1)
    name = "fineweb_val_000000.bin"
    assert (tmp_path / "out" / name).read_bytes() == hub.files[name]
    assert [wanted for file, wanted in hub.requests if file == name] == [
        "",
        f"bytes={6 * CHUNK}-",
        f"bytes={9 * CHUNK}-",
    ]


def test_a_stopped_download_goes_on_in_another_run(tmp_path: Path, hub: Hub) -> None:
    class StopError(BaseException):
        pass

    def stop(name: str, done: int, total: int) -> None:
        if done:
            raise StopError

    name = "fineweb_val_000000.bin"
    with pytest.raises(StopError):
        download("fineweb10B", tmp_path / "out", 1, stop)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"{name}.partial"]
    with pytest.raises(DataError):
        Dataset.open(tmp_path / "out")
    hub.requests.clear()
    download("fineweb10B", tmp_path / "out", 1)
    assert hub.requests[0] == (name, f"bytes={CHUNK}-")
    assert (tmp_path / "out" / name).read_bytes() == hub.files[name]


def test_a_hub_that_goes_away_is_a_sentence(tmp_path: Path, hub: Hub) -> None:
    hub.files["fineweb_val_000000.bin"] = hub.listed["fineweb_val_000000.bin"][:5000]
    with pytest.raises(DataError, match=r"fineweb_val_000000\.bin stopped at byte 5000 of 401024"):
        download("fineweb10B", tmp_path / "out", 1)
    hub.files = dict(hub.listed)
    download("fineweb10B", tmp_path / "out", 1)
    assert hub.requests[1] == ("fineweb_val_000000.bin", "bytes=5000-")


@pytest.mark.parametrize("offset", [0, 5000, 401_023])
def test_a_damaged_body_is_refused_and_removed(tmp_path: Path, hub: Hub, offset: int) -> None:
    damaged = bytearray(hub.files["fineweb_train_000001.bin"])
    damaged[offset] ^= 1
    hub.files["fineweb_train_000001.bin"] = bytes(damaged)
    with pytest.raises(DataError, match=r"fineweb_train_000001\.bin arrived damaged"):
        download("fineweb10B", tmp_path / "out", 1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["fineweb_val_000000.bin"]


def test_damage_on_disk_is_repaired(tmp_path: Path, hub: Hub) -> None:
    download("fineweb10B", tmp_path / "out", 1)
    path = tmp_path / "out/fineweb_train_000001.bin"
    path.write_bytes(path.read_bytes()[:-7] + b"garbage")
    (tmp_path / "out/fineweb_val_000000.bin").unlink()
    (tmp_path / "out/fineweb_val_000000.bin.partial").write_bytes(b"x" * 500_000)
    download("fineweb10B", tmp_path / "out", 1)
    assert path.read_bytes() == hub.files[path.name]
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_a_file_that_is_no_shard_is_refused(tmp_path: Path, hub: Hub) -> None:
    hub.files["fineweb_val_000000.bin"] = hub.listed["fineweb_val_000000.bin"] = b"<html>" * 1000
    with pytest.raises(DataError, match="is not a token shard"):
        download("fineweb10B", tmp_path / "out", 1)
    assert not list((tmp_path / "out").glob("*.bin"))


@pytest.mark.parametrize(
    ("name", "shards", "message"),
    [
        ("fineweb10b", 1, r"did you mean fineweb10B\?"),
        ("pile", 1, "choose fineweb10B, fineweb100B, finewebedu10B"),
        ("fineweb10B", 0, "ask for at least 1"),
        ("fineweb10B", 4, "has 3 training shards, not 4"),
        ("fineweb100B", 1, "the list of kjj0/fineweb100B-gpt2 cannot be had"),
    ],
)
def test_wrong_requests_are_refused(
    tmp_path: Path, hub: Hub, name: str, shards: int, message: str
) -> None:
    with pytest.raises(SpeedrunError, match=message) as caught:
        download(name, tmp_path / "out", shards)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_no_network_and_no_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(DataError, match=r"cannot be had from http://127\.0\.0\.1:9"):
        download("fineweb10B", tmp_path / "out", 1)
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install 'speedrun\[hub\]'"):
        download("fineweb10B", tmp_path / "out", 1)
