"""GPT-2's two public tokenizer files: from a folder, from tiktoken's cache, or from the network.

Their hashes are known, so whatever they come from is checked before it is used, and a folder of
public shards has a tokenizer fingerprint on a machine that is offline.
"""

import hashlib
import http.client
import os
import tempfile
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from speedrun.errors import DataError, SpeedrunError
from speedrun.files import write_atomically

TIMEOUT_SECONDS = 20.0


class PublicFile(NamedTuple):
    """One of GPT-2's two files: the names it goes by, its SHA-256, and where it is published."""

    names: tuple[str, ...]
    sha256: str
    url: str

    def holds(self, data: bytes) -> bool:
        return hashlib.sha256(data).hexdigest() == self.sha256


_HOME = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_MERGES = PublicFile(
    ("vocab.bpe", "merges.txt"),
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    _HOME + "vocab.bpe",
)
GPT2_VOCABULARY = PublicFile(
    ("encoder.json", "vocab.json"),
    "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    _HOME + "encoder.json",
)
GPT2_FINGERPRINT = hashlib.sha256(
    f"gpt2 {GPT2_MERGES.sha256} {GPT2_VOCABULARY.sha256}".encode()
).hexdigest()


def public_file(file: PublicFile, folder: Path | None) -> bytes:
    """The content of one of the files, from `folder` if that is given."""
    if folder is None:
        return _cached(file) or _fetch(file)
    found = [folder / name for name in file.names if (folder / name).is_file()]
    if not found:
        raise DataError(f"{folder} holds no {' or '.join(file.names)}: download {file.url} into it")
    data = read_stored(found[0])
    if not file.holds(data):
        raise DataError(
            f"{found[0]} is not the public GPT-2 file (SHA-256 "
            f"{hashlib.sha256(data).hexdigest()[:12]}, expected {file.sha256[:12]}): "
            f"download it again from {file.url}"
        )
    return data


def read_stored(path: Path) -> bytes:
    """A file that a stored tokenizer needs."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): restore the file") from None


def _cache_path(file: PublicFile) -> Path | None:
    """Where tiktoken keeps what comes from this address; an empty setting means nowhere."""
    default = str(Path(tempfile.gettempdir()) / "data-gym-cache")
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", default))
    return Path(folder) / hashlib.sha1(file.url.encode()).hexdigest() if folder else None


def _cached(file: PublicFile) -> bytes | None:
    path = _cache_path(file)
    with suppress(OSError):
        if path is not None and file.holds(data := path.read_bytes()):
            return data
    return None


def _fetch(file: PublicFile) -> bytes:
    # tiktoken's own download has no time limit.
    try:
        with urllib.request.urlopen(file.url, timeout=TIMEOUT_SECONDS) as response:
            data: bytes = response.read()
        if not file.holds(data):
            raise ValueError("what arrived has another SHA-256")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DataError(
            f"GPT-2's {file.names[0]} is not in tiktoken's cache and {file.url} cannot be fetched "
            f"({_reason(error)}): connect once, or copy {GPT2_MERGES.names[0]} and "
            f"{GPT2_VOCABULARY.names[0]} beside public shards, or into a folder and use gpt2:FOLDER"
        ) from None
    if path := _cache_path(file):
        with suppress(OSError, SpeedrunError):  # a cache that cannot be written is no mistake
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)
    return data


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", "") or error or type(error).__name__).split("\n")[0]
