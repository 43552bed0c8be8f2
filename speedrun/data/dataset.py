"""A dataset: a folder of shards, and a manifest with what a shard's header cannot hold.

`manifest.json` names the tokenizer and the sources and lists every shard with digests that let a
damaged file be found to within one chunk of 64 KiB. A folder without one holds public shards, whose
tokenizer is GPT-2's.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from speedrun.data.gpt2 import GPT2_FINGERPRINT, GPT2_MERGES
from speedrun.data.shards import (
    MAX_VOCAB,
    PUBLIC_EOT,
    PUBLIC_TOKENIZER,
    PUBLIC_VOCAB,
    ShardInfo,
    Split,
    read_header,
)
from speedrun.data.splits import TEST, TRAIN, VAL
from speedrun.data.tokenizer import Tokenizer, load_gpt2, load_tokenizer
from speedrun.errors import DataError
from speedrun.files import write_atomically

MANIFEST, MANIFEST_FORMAT = "manifest.json", 1
TOKENIZER = "tokenizer"  # the folder beside the manifest


@dataclass(frozen=True)
class SplitInfo:
    """One split's totals; `bytes` counts the raw UTF-8 text the tokens stand for."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    tokens: int
    documents: int
    bytes: int
    shards: tuple[ShardInfo, ...]


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

    def save(self, folder: Path) -> None:
        write_atomically(folder / MANIFEST, json.dumps(asdict(self), indent=1).encode())

    @staticmethod
    def load(folder: Path) -> Manifest:
        path = folder / MANIFEST
        try:
            manifest = TypeAdapter(Manifest).validate_json(path.read_bytes(), strict=True)
        except OSError as error:
            raise DataError(
                f"cannot read {path}: {error.strerror}; build the dataset again"
            ) from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise DataError(
                f"{path} is damaged: {where}: {first['msg']}; build the dataset again"
            ) from error
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
                if Path(shard.file).name != shard.file or not shard.file.isprintable():
                    return f"shard name {shard.file!r} is not a plain file name"
        return None


@dataclass(frozen=True)
class Dataset:
    """A folder of shards whose headers and sizes have been checked, but for those of the test.

    They are not opened until somebody asks for that split (`data/find.py: open_dataset`).
    """

    folder: Path
    splits: dict[str, Split]
    manifest: Manifest | None
    tokenizer_spec: str
    vocab_size: int
    eot: int

    @staticmethod
    def open(folder: Path) -> Dataset:
        manifest, found = find_shards(folder)
        splits = {}
        for name, shards in found.items():
            counts = tuple(
                shard.tokens if name == TEST and shard else checked_count(path, shard)
                for path, shard in shards.items()
            )
            info = manifest.splits[name] if manifest else None
            totals = (info.documents, info.bytes) if info else (None, None)
            splits[name] = Split(name, tuple(shards), counts, *totals)
        if manifest:
            kind = manifest.tokenizer, manifest.vocab_size, manifest.eot
        else:
            kind = PUBLIC_TOKENIZER, PUBLIC_VOCAB, PUBLIC_EOT
        return Dataset(folder, splits, manifest, *kind)

    @property
    def source_fingerprint(self) -> str:
        """Of the text it was built from; of the shards themselves where that is not known."""
        return self.manifest.source_fingerprint if self.manifest else self.fingerprint

    def split(self, name: str) -> Split:
        if name not in self.splits:
            raise DataError(
                f"{self.folder} has no split {name}, only {', '.join(self.splits)}: use one of "
                "these"
            )
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
        return self.manifest.tokenizer_fingerprint if self.manifest else GPT2_FINGERPRINT

    def tokenizer(self) -> Tokenizer:
        """Of public shards GPT-2's, from files that lie beside them if there are any."""
        if self.manifest:
            return load_tokenizer(self.folder / TOKENIZER)
        beside = any((self.folder / name).is_file() for name in GPT2_MERGES.names)
        return load_gpt2(self.folder if beside else None)


Shards = dict[Path, ShardInfo | None]  # files in order, with what the manifest knows of them


def find_shards(folder: Path) -> tuple[Manifest | None, dict[str, Shards]]:
    """The manifest, if there is one, and each split's files, none of them opened yet."""
    if not folder.is_dir():
        raise DataError(f"there is no dataset folder {folder}; make one with `speedrun data build`")
    if (folder / MANIFEST).exists():
        manifest = Manifest.load(folder)
        return manifest, {
            name: {folder / shard.file: shard for shard in info.shards}
            for name, info in manifest.splits.items()
        }
    # An unfinished build has shards but no manifest; it must not pass for public shards.
    if folder.suffix == ".partial" or (folder / TOKENIZER).exists():
        raise DataError(f"{folder} has no {MANIFEST}: its build did not finish; run it again")
    found: dict[str, Shards] = {}
    for name in (TRAIN, VAL):
        if paths := sorted(folder.glob(f"*_{name}_*.bin")):
            found[name] = dict.fromkeys(paths)
    if not found:
        raise DataError(
            f"{folder} holds neither {MANIFEST} nor shards named *_train_*.bin or *_val_*.bin; "
            "make a dataset with `speedrun data build` or `speedrun data download`"
        )
    return None, found


def checked_count(path: Path, recorded: ShardInfo | None) -> int:
    """The token count of a shard's header, which must be the one that the manifest has."""
    count = read_header(path)
    if recorded and count != recorded.tokens:
        raise DataError(
            f"{path} holds {count} tokens by byte 8 of its header, but {MANIFEST} lists "
            f"{recorded.tokens}; build the dataset again"
        )
    return count


def _ends_digest(path: Path) -> str:
    """SHA-256 of a shard's first and last MiB: all of 103 public shards would take a minute."""
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(1 << 20))
        file.seek(max(0, path.stat().st_size - (1 << 20)))
        digest.update(file.read())
    return digest.hexdigest()
