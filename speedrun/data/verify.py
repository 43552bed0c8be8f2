"""Read a whole dataset again and say what is wrong with it, by file and byte.

Opening a dataset checks headers and sizes; this checks every byte against the manifest's SHA-256
and, since a file digest cannot say where, its per-chunk checksums. It also checks what training
relies on: ids inside the vocabulary, documents that open with end-of-text and number as the
manifest says, and the tokenizer they were made with. Public shards have no manifest, so for them
headers, sizes and ids are all there is to check.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from speedrun.data.dataset import MANIFEST, TOKENIZER, Manifest, checked_count, find_shards
from speedrun.data.shards import (
    CHUNK_BYTES,
    HEADER_BYTES,
    PUBLIC_EOT,
    PUBLIC_VOCAB,
    TOKEN_DTYPE,
    ShardInfo,
    check_tokens,
)
from speedrun.data.splits import SPLITS
from speedrun.data.tokenizer import load_tokenizer
from speedrun.errors import DataError


@dataclass(frozen=True)
class Report:
    """What was read, and one sentence for each thing wrong."""

    shards: int
    bytes: int
    problems: tuple[str, ...]


@dataclass
class _Shard:
    """Findings of one pass over a file."""

    documents: int = 0
    first_token: int = -1
    problems: list[str] = field(default_factory=list)


def verify(
    folder: Path,
    splits: Collection[str] = SPLITS,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Report:
    """Check every file of these splits; a missing folder or manifest that cannot be read raises.

    `progress` is told the bytes done and the bytes in all.
    """
    manifest, every = find_shards(folder)
    found = {name: shards for name, shards in every.items() if name in splits}
    vocab_size = manifest.vocab_size if manifest else PUBLIC_VOCAB
    eot = manifest.eot if manifest else PUBLIC_EOT
    paths = [path for shards in found.values() for path in shards]
    total = sum(path.stat().st_size for path in paths if path.exists())
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    problems = _tokenizer_problems(folder, manifest) if manifest else []
    for name, shards in found.items():
        checks = [_check_shard(*shard, vocab_size, eot, advance) for shard in shards.items()]
        damage = [problem for check in checks for problem in check.problems]
        problems += damage
        # Damaged files are not counted too: one fault, one sentence.
        if not manifest or not checks or damage:
            continue
        if (opening := checks[0].first_token) != eot:
            problems.append(
                f"{next(iter(shards))} opens with token {opening} at byte {HEADER_BYTES}, but "
                f"a split opens with the end-of-text token {eot}; build the dataset again"
            )
        listed, documents = manifest.splits[name].documents, sum(c.documents for c in checks)
        if documents != listed:
            problems.append(
                f"split {name} of {folder} holds {documents} documents, but {MANIFEST} lists "
                f"{listed}; build the dataset again"
            )
    return Report(len(paths), done, tuple(problems))


def _check_shard(
    path: Path, info: ShardInfo | None, vocab_size: int, eot: int, advance: Callable[[int], None]
) -> _Shard:
    result = _Shard()
    digest, bad_chunks, offset = hashlib.sha256(), [], 0
    try:
        checked_count(path, info)
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                index = offset // CHUNK_BYTES
                if info and info.chunks[index : index + 1] != (f"{zlib.crc32(chunk):08x}",):
                    bad_chunks.append((offset, offset + len(chunk) - 1))
                skip = 0 if offset else HEADER_BYTES
                tokens = np.frombuffer(chunk, TOKEN_DTYPE, offset=skip)
                if not offset:
                    result.first_token = int(tokens[0])
                result.documents += int(np.count_nonzero(tokens == eot))
                if not result.problems:
                    try:
                        check_tokens(tokens, vocab_size, path, offset + skip)
                    except DataError as error:
                        result.problems.append(str(error))
                offset += len(chunk)
                advance(len(chunk))
    except BrokenPipeError:  # of whoever reads our progress, not of the file
        raise
    except OSError as error:
        result.problems.append(f"cannot read {path} past byte {offset}: {error.strerror}")
    except DataError as error:
        result.problems.append(str(error))
    if bad_chunks:
        others = f" and in {len(bad_chunks) - 1} later chunks" if len(bad_chunks) > 1 else ""
        result.problems.insert(
            0,
            f"{path} is damaged between bytes {bad_chunks[0][0]} and {bad_chunks[0][1]}{others}; "
            "fetch or build it again",
        )
    elif info and not result.problems and digest.hexdigest() != info.sha256:
        result.problems.append(
            f"{path} has SHA-256 {digest.hexdigest()[:12]}..., {MANIFEST} lists "
            f"{info.sha256[:12]}... though every chunk agrees: {MANIFEST} was changed; build again"
        )
    return result


def _tokenizer_problems(folder: Path, manifest: Manifest) -> list[str]:
    try:
        tokenizer = load_tokenizer(folder / TOKENIZER)
    except DataError as error:
        return [str(error)]
    stored = (tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eot)
    if stored == (manifest.tokenizer_fingerprint, manifest.vocab_size, manifest.eot):
        return []
    return [
        f"{folder / TOKENIZER} has fingerprint {stored[0][:12]}, vocabulary {stored[1]} and "
        f"end-of-text {stored[2]}, but {MANIFEST} lists {manifest.tokenizer_fingerprint[:12]}, "
        f"{manifest.vocab_size} and {manifest.eot}; build the dataset again"
    ]
