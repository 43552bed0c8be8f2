"""The attention mask of one real row, at two windows of record 18: which blocks are computed."""

from __future__ import annotations

import torch
from torch import Tensor

from speedrun.config.architecture import BLOCK
from speedrun.config.resolve import resolve
from speedrun.config.schedule import settings_at
from speedrun.data.loader import Loader
from speedrun.model.mask import block_lists, first_key
from tools.pictures.sample import dataset
from tools.pictures.svg import Drawing, Point

BLOCKS = 16
TOKENS = BLOCKS * BLOCK
CELL = 15.0
LEFT, TOP = (44.0, 300.0), 122.0


def row_documents() -> Tensor:
    """Document numbers of the first row that a loader gives of the made-up text, (1, T)."""
    with dataset() as data:
        split = data.split("train")
        with Loader(
            split, seq_len=TOKENS, batch_tokens=TOKENS, vocab_size=data.vocab_size, eot=data.eot,
            order="sequential",
        ) as loader:  # fmt: skip
            return next(loader).documents


def draw() -> str:
    config = resolve("record-18", "small").config
    documents_1T = row_documents()
    documents = len(set(documents_1T[0].tolist()))
    picture = Drawing(
        500,
        "The block mask of one row of 2,048 tokens",
        "Two squares of 16 by 16 blocks, queries down and keys across. With a narrow window only "
        "blocks near the diagonal are computed; with a wide one those of the query's own "
        "document. Most blocks are empty in both.",
    )
    picture.heading(
        "Who sees whom: the block mask of one row",
        f"{TOKENS:,} tokens of {documents} documents, in blocks of {BLOCK}",
    )
    for left, step in zip(LEFT, (config.steps // 5, config.steps), strict=True):
        window = settings_at(config, step).window
        assert window is not None, "record 18 has a window"
        first_T = first_key(documents_1T, torch.tensor(window), config.attention.window)[0]
        _square(picture, left, first_T, documents_1T[0])
        picture.text(left, TOP - 34, f"window of {window} blocks", bold=True, size=15)
        picture.text(left, TOP - 14, f"after {step:,} of {config.steps:,} steps", fill="soft")
    bottom = TOP + BLOCKS * CELL
    picture.text(36, TOP + BLOCKS * CELL / 2, "query", size=13, anchor="middle", turn=True)
    for left in LEFT:
        picture.text(left + BLOCKS * CELL / 2, bottom + 17, "key", size=13, anchor="middle")
    _legend(picture, bottom + 94)
    return picture.render()


def _square(picture: Drawing, left: float, first_T: Tensor, documents_T: Tensor) -> None:
    """Blocks by their kind, what is seen of the partial ones, and where documents begin."""
    lists = block_lists(first_T[None])
    size, counts = BLOCKS * CELL, {"full": 0, "partial": 0}
    picture.rect(left, TOP, size, size, "pale")
    for kind, colour, number, index in (
        ("partial", "part", lists.partial_count, lists.partial_index),
        ("full", "full", lists.full_count, lists.full_index),
    ):
        for query in range(BLOCKS):
            for key in index[0, query, : int(number[0, query])].tolist():
                counts[kind] += 1
                x, y = left + key * CELL, TOP + query * CELL
                picture.rect(x, y, CELL, CELL, colour)
        if kind == "partial":
            picture.shape(_seen(first_T.tolist(), left), "seen")
    for line in range(BLOCKS + 1):
        at = line * CELL
        picture.line([(left + at, TOP), (left + at, TOP + size)], "line", width=0.5)
        picture.line([(left, TOP + at), (left + size, TOP + at)], "line", width=0.5)
    starts = [0, *(i for i in range(1, TOKENS) if documents_T[i] != documents_T[i - 1])]
    for start, end in zip(starts, [*starts[1:], TOKENS], strict=True):
        low, high = start * CELL / BLOCK, end * CELL / BLOCK
        x, y = left, TOP
        picture.line(
            [(x + low, y + low), (x + low, y + high), (x + high, y + high)], "mark", width=1.2
        )
    computed = counts["full"] + counts["partial"]
    text = f"{counts['full']} full, {counts['partial']} partial, {BLOCKS**2 - computed} empty"
    picture.text(left + size / 2, TOP + size + 40, text, anchor="middle")
    seen = int((torch.arange(TOKENS) - first_T + 1).sum())
    share = f"{100 * computed / BLOCKS**2:.0f}% computed, {100 * seen / TOKENS**2:.0f}% seen"
    picture.text(left + size / 2, TOP + size + 60, share, anchor="middle", fill="soft", size=13)


def _seen(first: list[int], left: float) -> list[list[Point]]:
    """The exact mask as outlines: runs of queries whose first key stands still or moves along."""
    unit, outlines, start = CELL / BLOCK, list[list[Point]](), 0
    for query in range(1, len(first) + 1):
        if query < len(first) and first[query] == first[query - 1]:
            continue
        # Queries start .. query - 1 share their first key; keys go up to the query itself.
        x, y = left + first[start] * unit, TOP
        outlines.append([
            (x, y + start * unit), (left + (start + 1) * unit, y + start * unit),
            (left + query * unit, y + query * unit), (x, y + query * unit),
        ])  # fmt: skip
        start = query
    return outlines


def _legend(picture: Drawing, y: float) -> None:
    for x, below, colour, words in (
        (44, 0, "full", "full block: all of it is seen"), (300, 0, "pale", "empty: never computed"),
        (44, 24, "part", "partial block: a part of it is seen"),
    ):  # fmt: skip
        picture.rect(x, y + below - 11, 13, 13, colour, stroke="line")
        if colour == "part":
            picture.shape(
                [[(x, y + below - 11), (x, y + below + 2), (x + 13, y + below + 2)]], "seen"
            )
        picture.text(x + 20, y + below, words)
    picture.line([(370, y + 13), (370, y + 26), (383, y + 26)], "mark", width=1.6)
    picture.text(390, y + 24, "a document")
