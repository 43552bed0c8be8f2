"""How fast text becomes a dataset, and in how much memory.

Speed is in megabytes of text per second and core, for three tokenizers and four rivals that take
turns: `build`, the whole of `speedrun data build` with a tokenizer that is learned already
(reading, hashing, encoding, writing, forcing to disk); `encode`, our tokenizer alone; and the batch
calls of tiktoken and tokenizers, with the same vocabulary and held to the same ids. The text is
pieces of the standard library in JSON lines. GPT-2's own vocabulary is not ours to ship, so `gpt2`
is a BPE of its size and with its way of splitting words, learned here.

Memory is the most that the process of a build had resident, for a small text and for a large one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import tiktoken
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from speedrun.bench.loader import one_core
from speedrun.bench.timing import Figures, take_turns
from speedrun.data.build import build_dataset, checked_options
from speedrun.data.corpus import open_corpus
from speedrun.data.dataset import TOKENIZER
from speedrun.data.journal import Journal
from speedrun.data.shards import PUBLIC_VOCAB
from speedrun.data.tokenizer import (
    BPE_FILE,
    BYTE_OF,
    WORDS,
    ByteTokenizer,
    Tokenizer,
    train_bpe,
)
from speedrun.errors import ConfigError
from speedrun.limits import cores

MB = 1_000_000
VAL_FRACTION = 0.05
COMPARED = 100  # documents whose ids must be the same for all
# In a process of its own, without torch: what it prints is the build's and no one else's.
BUILD = """
import sys
from pathlib import Path
from speedrun.data.build import build_dataset
from speedrun.hardware import peak_memory_bytes
build_dataset([sys.argv[1]], Path(sys.argv[2]), sys.argv[3])
print(peak_memory_bytes())
"""


def measure_build(
    turns: int = 3,
    *,
    megabytes: float = 32,
    bpe: int = 4096,
    gpt2: int = PUBLIC_VOCAB,
    memory: Sequence[int] = (100, 2000),
) -> Figures:
    """Speeds on all cores and on one, each per core; a share is ours over the faster library's."""
    figures: Figures = {"cores": cores(), "gpt2_vocabulary": f"a stand-in of {gpt2:,} ids"}
    pieces = standard_library()
    for kind, tokenizer in (
        ("byte", ByteTokenizer()),
        ("bpe", train_bpe(pieces, bpe)),
        ("gpt2", train_bpe(pieces, gpt2)),
    ):
        figures |= measure_speed(kind, tokenizer, pieces, turns, megabytes)
    return figures | measure_memory(memory)


def measure_speed(
    kind: str, tokenizer: Tokenizer, pieces: Sequence[str], turns: int, megabytes: float
) -> Figures:
    """The libraries and our encoder get a quarter of the text: a build must load things first."""
    documents = [*texts(pieces, megabytes)]
    part = documents[: -(-len(documents) // 4)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.jsonl"
        write_lines(path, documents)
        rivals: dict[str, Callable[[], object]] = {
            "build": lambda: build_with(tokenizer, path),
            "encode": lambda: tokenizer.encode_batch(part),
            "tiktoken": tiktoken_call(tokenizer, part),
            "tokenizers": tokenizers_call(tokenizer, part),
        }
        sizes = {name: _megabytes(part) for name in rivals} | {"build": _megabytes(documents)}
        check_same_ids(tokenizer, part[:COMPARED])
        figures: Figures = {}
        for suffix, on_cores in (("", all_cores), ("_one_core", single_core)):
            with on_cores():
                seconds = take_turns(rivals, turns)
                speed = {name: sizes[name] / seconds[name] / cores() for name in rivals}
            faster = max(speed["tiktoken"], speed["tokenizers"])
            figures |= {
                f"{kind}_mb_per_second{suffix}": speed["build"],
                f"{kind}_share_of_faster{suffix}": speed["build"] / faster,
                f"{kind}_encode_share_of_faster{suffix}": speed["encode"] / faster,
            } | {
                f"{kind}_{name}_mb_per_second{suffix}": speed[name]
                for name in ("encode", "tiktoken", "tokenizers")
            }
    return figures


def build_with(tokenizer: Tokenizer, text: Path) -> None:
    """Build a dataset as one that had its tokenizer when it was stopped is gone on with."""
    out = text.with_name("dataset")
    partial = text.with_name("dataset.partial")
    _, options = checked_options(tokenizer.spec, VAL_FRACTION, VAL_FRACTION)
    tokenizer.save(partial / TOKENIZER)
    stamp = open_corpus([str(text)]).stamp()
    Journal(stamp, options, tokenizer=tokenizer.fingerprint).save(partial)
    build_dataset([str(text)], out, tokenizer.spec, val_fraction=VAL_FRACTION,
                  test_fraction=VAL_FRACTION, force=True)  # fmt: skip


def tiktoken_call(tokenizer: Tokenizer, documents: Sequence[str]) -> Callable[[], list[list[int]]]:
    ranks = {token: rank for rank, token in enumerate(tokenizer.tokens) if rank != tokenizer.eot}
    encoding = tiktoken.Encoding("rival", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={})
    given = [*documents]
    return lambda: encoding.encode_ordinary_batch(given, num_threads=cores())


def tokenizers_call(
    tokenizer: Tokenizer, documents: Sequence[str]
) -> Callable[[], list[tokenizers.Encoding]]:
    if BPE_FILE in tokenizer.files:
        library = tokenizers.Tokenizer.from_str(tokenizer.files[BPE_FILE].decode())
    else:
        library = tokenizers.Tokenizer(models.BPE(vocab=BYTE_OF, merges=[]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        library.decoder = decoders.ByteLevel()
    given = [*documents]
    return lambda: library.encode_batch_fast(given, add_special_tokens=False)


def check_same_ids(tokenizer: Tokenizer, documents: Sequence[str]) -> None:
    ours = [ids.tolist() for ids in tokenizer.encode_batch(documents)]
    assert ours == tiktoken_call(tokenizer, documents)(), "tiktoken gives other ids"
    others = [encoding.ids for encoding in tokenizers_call(tokenizer, documents)()]
    assert ours == others, "tokenizers gives other ids"


@contextmanager
def all_cores() -> Iterator[None]:
    yield


@contextmanager
def single_core() -> Iterator[None]:
    """tokenizers has threads of its own that one_core() comes too late for, and can be told."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        with one_core():
            yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def measure_memory(sizes: Sequence[int] = (100, 2000), tokenizer: str = "byte") -> Figures:
    """Peak memory of a build of each size, and how much more the last one takes than the first."""
    pieces = standard_library()
    peaks = {size: build_memory(pieces, size, tokenizer) / MB for size in sizes}
    return {
        **{f"memory_{size_name(size)}": peak for size, peak in peaks.items()},
        "memory_growth_mb": max(0.0, peaks[sizes[-1]] - peaks[sizes[0]]),
        "memory_tokenizer": tokenizer,
    }


def build_memory(pieces: Sequence[str], megabytes: int, tokenizer: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        # The text, and two bytes for each of its bytes.
        needed, free = 3.2 * MB * megabytes, shutil.disk_usage(folder).free
        if free < needed:
            raise ConfigError(
                f"bench build needs {needed / 1e9:.1f} GB in {folder}, which has "
                f"{free / 1e9:.1f}: free some space or set TMPDIR to another folder"
            )
        path = Path(folder) / "text.jsonl"
        write_lines(path, texts(pieces, megabytes))
        words = [sys.executable, "-c", BUILD, str(path), str(Path(folder) / "dataset"), tokenizer]
        return int(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)


def standard_library() -> list[str]:
    return [document.text for document in open_corpus(["stdlib"]).documents()]


def texts(pieces: Sequence[str], megabytes: float) -> Iterator[str]:
    """That much text in documents of up to 8,000 characters, each cut somewhere and numbered."""
    random, size, number = Random(0), 0, 0
    while size < MB * megabytes:
        piece = random.choice(pieces)
        begin = random.randrange(len(piece))
        text = f"{number}\n{piece[begin : begin + random.randrange(500, 8000)]}"
        yield text
        number += 1
        size += len(text.encode())


def write_lines(path: Path, documents: Iterable[str]) -> None:
    with path.open("w") as file:
        for text in documents:
            file.write(json.dumps({"text": text}) + "\n")


def size_name(megabytes: int) -> str:
    return f"{megabytes // 1000}gb" if megabytes % 1000 == 0 else f"{megabytes}mb"


def _megabytes(documents: Sequence[str]) -> float:
    return sum(len(text.encode()) for text in documents) / MB
