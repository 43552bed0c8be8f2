"""Token shards on disk: the file format, the manifest beside it, and the dataset they make.

A shard is 256 little-endian int32 (magic, version, token count, zeros) followed by that many uint16
tokens: the layout of the public FineWeb shards, so those files are read as they are and ours can be
read by any program that reads them. Every document opens with the end-of-text token and may run on
into the next shard. `manifest.json` adds what a header cannot hold: the tokenizer, the sources, and
digests that let a damaged file be found to within one chunk of 64 KiB.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError

from speedrun.errors import DataError

if TYPE_CHECKING:
    from speedrun.data.tokenizer import Tokenizer

Tokens = NDArray[np.uint16]

MAGIC, VERSION = 20240520, 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
TOKEN_DTYPE = np.dtype("<u2")
MAX_VOCAB = 65_535
SHARD_TOKENS = 100_000_000
MAX_SHARD_TOKENS = 2**31 - 1  # the header counts in int32
CHUNK_BYTES = 64 << 10
MANIFEST, MANIFEST_FORMAT = "manifest.json", 1

# What the public shards hold; they come without a manifest.
PUBLIC_TOKENIZER, PUBLIC_VOCAB, PUBLIC_EOT = "gpt2", 50_257, 50_256


def check_vocab_size(vocab_size: int) -> None:
    """Tokens are two bytes wide on disk, and the largest two-byte number is kept free."""
    if not 2 <= vocab_size <= MAX_VOCAB:
        raise DataError(
            f"a vocabulary of {vocab_size} does not fit the shard format, which holds 2 to "
            f"{MAX_VOCAB} ids; choose a smaller tokenizer, for example bpe:32768"
        )


def write_atomically(path: Path, data: bytes | bytearray) -> None:
    """Make `path` appear whole or not at all, even if the machine stops midway."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(
            f"cannot write {path}: {error.strerror}; free some space or choose another folder"
        ) from error


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


def write_shard(path: Path | str, tokens: NDArray[np.integer]) -> str:
    """Write one shard and return the SHA-256 of the file."""
    data = _header(len(tokens)) + _token_bytes(tokens)
    write_atomically(Path(path), data)
    return hashlib.sha256(data).hexdigest()


def read_header(path: Path | str) -> int:
    """The token count of a shard whose header and file size agree; anything else is a DataError."""
    try:
        with Path(path).open("rb") as file:
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


def read_tokens(
    path: Path | str, out: Tokens | None = None, *, vocab_size: int = MAX_VOCAB
) -> Tokens:
    """Read a whole shard, or its first `len(out)` tokens into `out`, and check every id."""
    count = read_header(path)
    tokens = np.empty(count, TOKEN_DTYPE) if out is None else out
    assert len(tokens) <= count, "asked for more tokens than the shard holds"
    view, done = tokens.view(np.uint8).data, 0
    try:
        with Path(path).open("rb", buffering=0) as file:
            file.seek(HEADER_BYTES)
            # One read call returns at most 2 GiB on Linux, so a large shard takes several.
            while done < len(view) and (got := file.readinto(view[done:])):
                done += got
    except OSError as error:
        raise DataError(f"cannot read shard {path}: {error.strerror}") from error
    if done < len(view):
        raise DataError(f"{path} is truncated at byte {HEADER_BYTES + done}; build it again")
    check_tokens(tokens, vocab_size, path)
    return tokens


def check_tokens(
    tokens: Tokens, vocab_size: int, path: Path | str, offset: int = HEADER_BYTES
) -> None:
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


@dataclass(frozen=True)
class SplitInfo:
    """One split's totals; `bytes` counts the raw UTF-8 text the tokens stand for."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    tokens: int
    documents: int
    bytes: int
    shards: tuple[ShardInfo, ...]


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
        prefix: str = "speedrun",
        shard_tokens: int = SHARD_TOKENS,
        finished: Sequence[ShardInfo] = (),
    ) -> None:
        if not 0 < shard_tokens <= MAX_SHARD_TOKENS:
            raise DataError(f"a shard holds 1 to {MAX_SHARD_TOKENS} tokens, not {shard_tokens}")
        self.shards = list(finished)
        self._name = f"{prefix}_{split}"
        self._folder = folder
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
        name = f"{self._name}_{len(self.shards):06d}.bin"
        write_atomically(self._folder / name, image)
        digest = hashlib.sha256(image).hexdigest()
        self.shards.append(ShardInfo(name, count, digest, chunk_checksums(image)))
        self._image = bytearray(HEADER_BYTES)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a dataset says about itself, kept as plain JSON beside its shards."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    format: int = MANIFEST_FORMAT
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    eot: int
    sources: tuple[str, ...]
    source_fingerprint: str
    splits: dict[str, SplitInfo]

    def save(self, folder: Path | str) -> None:
        check_vocab_size(self.vocab_size)
        write_atomically(Path(folder) / MANIFEST, json.dumps(asdict(self), indent=1).encode())

    @staticmethod
    def load(folder: Path | str) -> Manifest:
        path = Path(folder) / MANIFEST
        try:
            manifest = TypeAdapter(Manifest).validate_json(path.read_bytes(), strict=True)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            what = f"{where}: {first['msg']}"
            raise DataError(f"{path} is damaged: {what}; build the dataset again") from error
        if problem := manifest._contradiction():
            raise DataError(f"{path} is damaged: {problem}; build the dataset again")
        return manifest

    def _contradiction(self) -> str | None:
        if self.format != MANIFEST_FORMAT:
            return f"format {self.format} is not the known format {MANIFEST_FORMAT}"
        if not 2 <= self.vocab_size <= MAX_VOCAB or not 0 <= self.eot < self.vocab_size:
            return f"vocab_size {self.vocab_size} with eot {self.eot} cannot be"
        for name, split in self.splits.items():
            if split.tokens != (held := sum(shard.tokens for shard in split.shards)):
                return f"split {name} claims {split.tokens} tokens but its shards hold {held}"
            for shard in split.shards:
                if Path(shard.file).name != shard.file:
                    return f"shard name {shard.file!r} is not a plain file name"
        return None


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
        tokens, done = np.empty(count, TOKEN_DTYPE), 0
        for path, held in zip(self.paths, self.counts, strict=True):
            if done < count:
                done += len(read_tokens(path, tokens[done : done + held], vocab_size=vocab_size))
        return tokens


@dataclass(frozen=True)
class Dataset:
    """A folder of shards whose headers and sizes have all been checked."""

    folder: Path
    splits: dict[str, Split]
    manifest: Manifest | None
    tokenizer_spec: str
    vocab_size: int
    eot: int

    @staticmethod
    def open(folder: Path | str) -> Dataset:
        folder = Path(folder)
        manifest, found = find_shards(folder)
        splits = {}
        for name, paths in found.items():
            counts = tuple(map(read_header, paths))
            info = manifest.splits[name] if manifest else None
            for path, count, shard in zip(paths, counts, info.shards if info else (), strict=False):
                if count != shard.tokens:
                    raise DataError(
                        f"{path} holds {count} tokens by byte 8 of its header, but {MANIFEST} "
                        f"lists {shard.tokens}; build the dataset again"
                    )
            totals = (info.documents, info.bytes) if info else (None, None)
            splits[name] = Split(name, paths, counts, *totals)
        if manifest:
            kind = manifest.tokenizer, manifest.vocab_size, manifest.eot
        else:
            kind = PUBLIC_TOKENIZER, PUBLIC_VOCAB, PUBLIC_EOT
        return Dataset(folder, splits, manifest, *kind)

    def split(self, name: str) -> Split:
        if name not in self.splits:
            raise DataError(f"{self.folder} has no split {name}, only {', '.join(self.splits)}")
        return self.splits[name]

    @property
    def fingerprint(self) -> str:
        """Names the token stream and its tokenizer, whatever the folder and files are called."""
        kind = f"{self.tokenizer_fingerprint} {self.vocab_size} {self.eot}"
        digest = hashlib.sha256(kind.encode())
        for name, split in sorted(self.splits.items()):
            digest.update(f"\n{name} {split.counts}".encode())
            if self.manifest:
                digests = [shard.sha256 for shard in self.manifest.splits[name].shards]
            else:
                digests = [_ends_digest(path) for path in split.paths]
            digest.update("".join(digests).encode())
        return digest.hexdigest()

    @property
    def tokenizer_fingerprint(self) -> str:
        from speedrun.data.tokenizer import GPT2_FINGERPRINT

        return self.manifest.tokenizer_fingerprint if self.manifest else GPT2_FINGERPRINT

    def tokenizer(self) -> Tokenizer:
        from speedrun.data.tokenizer import load_gpt2, load_tokenizer

        return load_tokenizer(self.folder / "tokenizer") if self.manifest else load_gpt2()


def find_shards(folder: Path) -> tuple[Manifest | None, dict[str, tuple[Path, ...]]]:
    """The manifest, if there is one, and each split's files in order, none of them opened yet."""
    if not folder.is_dir():
        raise DataError(f"there is no dataset folder {folder}; make one with `speedrun data build`")
    if (folder / MANIFEST).exists():
        manifest = Manifest.load(folder)
        named = manifest.splits.items()
        return manifest, {name: tuple(folder / s.file for s in info.shards) for name, info in named}
    # An unfinished build has shards but no manifest; it must not pass for public shards.
    if folder.suffix == ".partial" or (folder / "tokenizer").exists():
        raise DataError(f"{folder} has no {MANIFEST}: its build did not finish; run it again")
    found = {name: tuple(sorted(folder.glob(f"*_{name}_*.bin"))) for name in ("train", "val")}
    found = {name: paths for name, paths in found.items() if paths}
    if not found:
        raise DataError(
            f"{folder} holds neither {MANIFEST} nor shards named *_train_*.bin or *_val_*.bin; "
            "make a dataset with `speedrun data build` or `speedrun data download`"
        )
    return None, found


def _ends_digest(path: Path) -> str:
    """SHA-256 of a shard's first and last MiB: all of 103 public shards would take a minute."""
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(1 << 20))
        file.seek(max(0, path.stat().st_size - (1 << 20)))
        digest.update(file.read())
    return digest.hexdigest()
