"""A local server that answers as the hub does."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from speedrun.data.download import REPOSITORIES
from speedrun.data.shards import write_shard

REPOSITORY = REPOSITORIES["fineweb10B"]
COMMIT = "0123456789" * 4


class Hub(ThreadingHTTPServer):
    """One dataset repository: files by name, and how the next answers are to go wrong."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files: dict[str, bytes] = {}
        self.listed: dict[str, bytes] = {}  # what sizes and hashes are told of
        self.cut_after: list[int] = []  # the next bodies end after so many bytes
        self.requests: list[tuple[str, str]] = []  # file and Range header of each GET
        self.knows_ranges = True

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
        match = re.fullmatch(r"bytes=(\d+)-", wanted) if self.server.knows_ranges else None
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


@contextmanager
def serve_hub(scratch: Path) -> Iterator[Hub]:
    """A validation and three training shards of 200,000 random tokens."""
    server = Hub()
    draw = np.random.default_rng(0)
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, 4))]
    for name in names:
        write_shard(scratch / "shard", draw.integers(0, 50257, 200_000).astype(np.uint16))
        server.files[name] = (scratch / "shard").read_bytes()
    (scratch / "shard").unlink()
    server.listed = dict(server.files)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
