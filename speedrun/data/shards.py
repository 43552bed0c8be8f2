"""Token shards on disk: the file format, read and written.

A shard is 256 little-endian int32 (magic, version, token count, zeros) followed by that many uint16
tokens: the layout of the public FineWeb shards, so those files are read as they are and ours can be
read by any program that reads them. Every document opens with the end-of-text token and may run on
into the next shard.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from speedrun.errors import DataError
from speedrun.files import write_atomically

Tokens = NDArray[np.uint16]

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 4 * 256
TOKEN_DTYPE = np.dtype("<u2")
MAX_VOCAB = 65_535  # tokens are two bytes wide, and the largest two-byte number is kept free
SHARD_TOKENS = 100_000_000
MAX_SHARD_TOKENS = 2**31 - 1  # the header counts in int32
CHUNK_BYTES = 64 << 10
KEEP_BYTES = 512 << 20  # shards up to this size in all are kept in memory, and hashed before use

# What the public shards hold; they come without a manifest.
PUBLIC_TOKENIZER, PUBLIC_VOCAB, PUBLIC_EOT = "gpt2", 50_257, 50_256


def chunk_checksums(data: bytes | bytearray) -> tuple[str, ...]:
    """CRC-32 of each 64 KiB of a shard file: eight hex digits per chunk tell where damage lies."""
    with memoryview(data) as view:
        starts = range(0, len(view), CHUNK_BYTES)
        return tuple(f"{zlib.crc32(view[start : start + CHUNK_BYTES]):08x}" for start in starts)


def _header(count: int) -> bytes:
    return struct.pack("<3i", MAGIC, VERSION, count).ljust(HEADER_BYTES, b"\0")


def _token_bytes(tokens: NDArray[np.integer]) -> memoryview:
    assert not tokens.size or 0 <= tokens.min() <= tokens.max() < MAX_VOCAB, "token id too large"
    return np.ascontiguousarray(tokens, TOKEN_DTYPE).view(np.uint8).data


def write_shard(path: Path, tokens: NDArray[np.integer]) -> str:
    """Write one shard and return the SHA-256 of the file."""
    data = _header(len(tokens)) + _token_bytes(tokens)
    write_atomically(path, data)
    return hashlib.sha256(data).hexdigest()


def read_header(path: Path) -> int:
    """The token count of a shard whose header and file size agree; anything else is a DataError."""
    try:
        with path.open("rb") as file:
            header, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"cannot read shard {path}: {error.strerror}") from error
    if len(header) < HEADER_BYTES:
        raise DataError(
            f"{path} ends at byte {size}, inside the {HEADER_BYTES}-byte header of a shard; "
            "fetch or build it again"
        )
    magic, version, count = struct.unpack_from("<3i", header)
    fields = [
        (0, "magic number", magic, f"{MAGIC}", magic == MAGIC),
        (4, "version", version, f"{VERSION}", version == VERSION),
        (8, "token count", count, "at least 1", count > 0),
    ]
    for offset, name, value, expected, good in fields:
        if not good:
            raise DataError(
                f"{path} is not a token shard: the {name} at byte {offset} is {value}, expected "
                f"{expected}; point to a folder of shards or build one with `speedrun data build`"
            )
    promised = HEADER_BYTES + TOKEN_DTYPE.itemsize * count
    if size != promised:
        how = "is truncated at" if size < promised else "runs on to"
        raise DataError(
            f"{path} {how} byte {size}, but its header promises {count} tokens, {promised} bytes "
            "in all; fetch or build it again"
        )
    return int(count)


def read_tokens(path: Path, first: int = MAX_SHARD_TOKENS, vocab_size: int = MAX_VOCAB) -> Tokens:
    """A shard's `first` tokens, all of them if there are no more, with every id checked."""
    count = min(first, read_header(path))
    tokens: Tokens = np.fromfile(path, TOKEN_DTYPE, count, offset=HEADER_BYTES)
    if len(tokens) < count:  # numpy passes over what the disk could not give
        raise DataError(f"{path} cannot be read past token {len(tokens)}; build it again")
    check_tokens(tokens, vocab_size, path)
    return tokens


def check_tokens(tokens: Tokens, vocab_size: int, path: Path, offset: int = HEADER_BYTES) -> None:
    """Refuse an id past the vocabulary; `offset` is where in the file `tokens` begins."""
    if tokens.size and tokens.max() >= vocab_size:
        first = int(np.argmax(tokens >= vocab_size))
        raise DataError(
            f"{path} holds token {tokens[first]} at byte {offset + 2 * first}, past the vocabulary "
            f"of {vocab_size}; the file is damaged or was made with another tokenizer"
        )


@dataclass(frozen=True)
class ShardInfo:
    """One shard file as the manifest knows it; `chunks` are its CRC-32s, one per 64 KiB."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    file: str
    tokens: int
    sha256: str
    chunks: tuple[str, ...]


class ShardWriter:
    """Gathers documents into shards of `shard_tokens`, holding only the shard being filled.

    A stopped build hands the shards it had completed as `finished` and goes on with the token
    after them: `pending` says how many of the tokens added are not yet in a shard on disk.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        *,
        shard_tokens: int = SHARD_TOKENS,
        finished: Sequence[ShardInfo] = (),
    ) -> None:
        if not 0 < shard_tokens <= MAX_SHARD_TOKENS:
            raise DataError(f"a shard holds 1 to {MAX_SHARD_TOKENS} tokens, not {shard_tokens}")
        self.shards = list(finished)
        self._folder, self._split = folder, split
        self._full = HEADER_BYTES + TOKEN_DTYPE.itemsize * shard_tokens
        self._image = bytearray(HEADER_BYTES)

    @property
    def pending(self) -> int:
        return (len(self._image) - HEADER_BYTES) // TOKEN_DTYPE.itemsize

    def add(self, tokens: NDArray[np.integer]) -> None:
        data = _token_bytes(tokens)
        while data:
            room = self._full - len(self._image)
            self._image += data[:room]
            data = data[room:]
            if len(self._image) == self._full:
                self._flush()

    def finish(self) -> list[ShardInfo]:
        """Write what is left, a shorter last shard, and return every shard in order."""
        if self.pending:
            self._flush()
        return self.shards

    def _flush(self) -> None:
        count, image = self.pending, self._image
        image[:HEADER_BYTES] = _header(count)
        name = f"speedrun_{self._split}_{len(self.shards):06d}.bin"
        write_atomically(self._folder / name, image)
        digest = hashlib.sha256(image).hexdigest()
        self.shards.append(ShardInfo(name, count, digest, chunk_checksums(image)))
        self._image = bytearray(HEADER_BYTES)


@dataclass(frozen=True)
class Split:
    """The shards of one split in reading order; documents and bytes are None when unknown."""

    name: str
    paths: tuple[Path, ...]
    counts: tuple[int, ...]
    documents: int | None = None
    bytes: int | None = None

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    def head(self, count: int, vocab_size: int) -> Tokens:
        """The split's first `count` tokens, from as many shards as that takes."""
        parts: list[Tokens] = []
        for path in self.paths:
            if count > 0:
                parts.append(read_tokens(path, count, vocab_size))
                count -= len(parts[-1])
        return np.concatenate(parts)
