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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from speedrun.errors import DataError, SpeedrunError
from speedrun.files import sha256_of, write_atomically

Tokens = NDArray[np.uint16]

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 4 * 256
TOKEN_DTYPE = np.dtype("<u2")
MAX_VOCAB = 65_535  # tokens are two bytes wide, and the largest two-byte number is kept free
SHARD_TOKENS = 100_000_000
MAX_SHARD_TOKENS = 2**31 - 1  # the header counts in int32
CHUNK_BYTES = 64 << 10
BLOCK_CHUNKS = 16  # a shard is hashed and written this many chunks at a time
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
        raise DataError(
            f"cannot read shard {path}: {error.strerror}; fetch or build it again"
        ) from error
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
            f"of {vocab_size}; the file is damaged or was made with another tokenizer: fetch or "
            "build it again"
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
    """Puts documents into shards of `shard_tokens`, each on disk as far as it is filled.

    Only a block of a shard is ever in memory. Its file has a temporary name until it is full, so a
    shard with its own name is whole; `close` removes the one that is not.

    A stopped build hands the shards it had completed as `finished` and goes on with the token
    after them: `pending` says how many of the tokens added are not yet in a finished shard.
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
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._shard: _GrowingShard | None = None

    @property
    def pending(self) -> int:
        return self._shard.tokens if self._shard else 0

    @property
    def room(self) -> int:
        """How many tokens more fill the shard."""
        return self._shard_tokens - self.pending

    def add(self, tokens: NDArray[np.integer]) -> None:
        data = _token_bytes(tokens)
        while data:
            if self._shard is None:
                name = f"speedrun_{self._split}_{len(self.shards):06d}.bin"
                self._shard = _GrowingShard(self._folder / name, self._shard_tokens)
            room = TOKEN_DTYPE.itemsize * self.room
            self._shard.add(data[:room])
            data = data[room:]
            if not self.room:
                self._finish_shard(self._shard)

    def finish(self) -> list[ShardInfo]:
        """Complete what is left, a shorter last shard, and return every shard in order."""
        if self._shard:
            self._finish_shard(self._shard)
        return self.shards

    def close(self) -> None:
        """Remove the shard being filled, if there is one."""
        if self._shard:
            self._shard.discard()
        self._shard = None

    def _finish_shard(self, shard: _GrowingShard) -> None:
        self.shards.append(shard.finish())
        self._shard = None


class _GrowingShard:
    """A shard under a temporary name, hashed and checksummed block by block as it is written."""

    def __init__(self, path: Path, full: int) -> None:
        self.tokens, self._full = 0, full
        self._path, self._temporary = path, path.with_name(path.name + ".tmp")
        self._digest, self._chunks = hashlib.sha256(), list[str]()
        self._block, self._block_bytes = bytearray(_header(full)), BLOCK_CHUNKS * CHUNK_BYTES
        with self._writing():
            self._file = self._temporary.open("wb", buffering=0)

    def add(self, data: memoryview) -> None:
        self.tokens += len(data) // TOKEN_DTYPE.itemsize
        while data:
            room = self._block_bytes - len(self._block)
            self._block += data[:room]
            data = data[room:]
            if len(self._block) == self._block_bytes:
                self._write_block()

    def finish(self) -> ShardInfo:
        self._write_block()
        digest = self._digest.hexdigest()
        with self._writing():
            if self.tokens < self._full:
                digest = self._correct_header()
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary.replace(self._path)
        return ShardInfo(self._path.name, self.tokens, digest, tuple(self._chunks))

    def discard(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _write_block(self) -> None:
        self._digest.update(self._block)
        self._chunks += chunk_checksums(self._block)
        rest = memoryview(self._block)
        with self._writing():
            while rest:
                rest = rest[self._file.write(rest) :]
        self._block = bytearray()

    def _correct_header(self) -> str:
        """The file was begun as a full shard; say how long it is, and hash it again."""
        os.pwrite(self._file.fileno(), _header(self.tokens), 0)
        with self._temporary.open("rb") as file:
            self._chunks[:1] = chunk_checksums(file.read(CHUNK_BYTES))
        return sha256_of(self._temporary)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            self._temporary.unlink(missing_ok=True)
            raise SpeedrunError(
                f"cannot write {self._path}: {problem.strerror}; free some space or choose "
                "another folder"
            ) from problem


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

    def rows(self, numbers: NDArray[np.integer], seq_len: int, vocab_size: int) -> Tokens:
        """Rows of T + 1 tokens: row i begins at token iT of the split, whose shards are one stream.

        Only these are read.
        """
        found = np.empty((len(numbers), seq_len + 1), TOKEN_DTYPE)
        begin = 0
        for path, count in zip(self.paths, self.counts, strict=True):
            for row, number in zip(found, numbers, strict=True):
                start = int(number) * seq_len
                first, end = max(start, begin), min(start + seq_len + 1, begin + count)
                if first < end:
                    offset = HEADER_BYTES + TOKEN_DTYPE.itemsize * (first - begin)
                    tokens: Tokens = np.fromfile(path, TOKEN_DTYPE, end - first, offset=offset)
                    if len(tokens) < end - first:
                        raise DataError(f"{path} ends before token {end - begin}; build it again")
                    check_tokens(tokens, vocab_size, path, offset)
                    row[first - start : end - start] = tokens
            begin += count
        return found

    def head(self, count: int, vocab_size: int) -> Tokens:
        """The split's first `count` tokens, from as many shards as that takes."""
        parts: list[Tokens] = []
        for path in self.paths:
            if count > 0:
                parts.append(read_tokens(path, count, vocab_size))
                count -= len(parts[-1])
        return np.concatenate(parts)
