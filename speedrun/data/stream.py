"""A corpus on its way to the encoder: hashed, in batches, read by a thread of its own.

Reading and hashing one batch overlaps encoding the one before, and only a few are in memory.
"""

import hashlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from speedrun.data.corpus import Corpus, Notes
from speedrun.limits import cores

T = TypeVar("T")
# What is being done or fetched, bytes so far, bytes in all (0 if not known).
ProgressCallback = Callable[[str, int, int], None]

BATCH_BYTES_PER_CORE = 1 << 20  # of text encoded at once; about five batches are in memory
BATCH_DOCUMENTS = 4096
PROGRESS_SECONDS = 0.1
TURN_SECONDS = 0.0005


class Hashed(NamedTuple):
    """A document on its way to the encoder."""

    number: int
    text: str
    hash: bytes
    text_hash: bytes  # the same, or of the first part of the file that the document was cut from
    bytes: int
    side: str  # the split that its source was named for, if it was
    whole: int  # number of the text that it is, or of the file that it was cut from


def hashed(
    corpus: Corpus, stage: str, report: ProgressCallback, notes: Notes | None = None
) -> Iterator[Hashed]:
    total, last, text_hash, whole = corpus.total_bytes, 0.0, b"", 0
    packed, size = corpus.packed, 0

    def tell(read: int) -> None:
        """Of packed files the bytes of text, and as many in all as it looks by now."""
        report(stage, *((size, size * total // max(1, read)) if packed else (read, total)))

    report(stage, 0, 0 if packed else total)
    for number, document in enumerate(corpus.documents(notes)):
        data = document.text.encode()
        own = hashlib.sha256(data).digest()
        if document.first:
            text_hash, whole = own, whole + 1
        yield Hashed(number, document.text, own, text_hash, len(data), document.side, whole)
        size += len(data)
        if (now := time.monotonic()) - last > PROGRESS_SECONDS:
            last = now
            tell(document.read)
    tell(total)


def batches(documents: Iterator[Hashed]) -> Iterator[list[Hashed]]:
    batch: list[Hashed] = []
    size, enough = 0, cores() * BATCH_BYTES_PER_CORE
    for document in documents:
        batch.append(document)
        size += document.bytes
        if size >= enough or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextmanager
def taking_turns() -> Iterator[None]:
    """Python's threads change every half millisecond instead of every five.

    An encoder's thread asks for its turn after each document, and while another reads or writes it
    would wait for most of that time: on two cores a build took a tenth longer.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def read_ahead(items: Iterator[T], depth: int = 2) -> Iterator[T]:
    """The same items, produced by a thread that stays up to `depth` ahead."""
    end = object()
    with ThreadPoolExecutor(1) as thread:
        coming = deque(thread.submit(next, items, end) for _ in range(depth))
        while (item := coming.popleft().result()) is not end:
            coming.append(thread.submit(next, items, end))
            yield item  # type: ignore[misc]
