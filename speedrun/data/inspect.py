"""The first documents of a dataset, as plain data to print, and how its texts begin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speedrun.data.corpus import STDLIB
from speedrun.data.dataset import Dataset
from speedrun.data.splits import TRAIN, VAL
from speedrun.data.tokenizer import Tokenizer

PREVIEW_TOKENS = 1 << 20  # how far into a split first documents are looked for: 2 MiB


CODE_PROMPT = "class Reader:\n    def __init__(self"  # for a model of Python's own library
PROMPT_TOKENS, PROMPT_CHARACTERS = 64, 40


@dataclass(frozen=True)
class DocumentPreview:
    """The beginning of a document; `tokens` is its whole length, None if it runs out of view."""

    ids: tuple[int, ...]
    text: str  # of the ids, where there is a tokenizer
    tokens: int | None


def first_documents(
    dataset: Dataset,
    tokenizer: Tokenizer | None,
    split: str = TRAIN,
    *,
    count: int = 3,
    max_tokens: int = 128,
) -> list[DocumentPreview]:
    """The first documents of a split, up to `max_tokens` tokens of each.

    A public shard may open in the middle of a document; what precedes the first end-of-text token
    is passed over, unless there is nothing else.
    """
    held = dataset.split(split)
    tokens = held.head(min(PREVIEW_TOKENS, held.tokens), dataset.vocab_size)
    starts = np.flatnonzero(tokens == dataset.eot)
    if not len(starts):
        starts = np.array([-1])
    previews = []
    for start, end in zip(starts[:count], [*starts[1 : count + 1], None], strict=False):
        body = tokens[start + 1 : end]
        whole = end is not None or len(tokens) == held.tokens
        ids = body[:max_tokens]
        text = tokenizer.decode(ids) if tokenizer else ""
        known = len(body) if whole else None
        previews.append(DocumentPreview(tuple(ids.tolist()), text, known))
    return previews


def prompt_of(dataset: Dataset, tokenizer: Tokenizer) -> str:
    """How a text of this dataset may begin, for a model of it to go on: a part of a line.

    It is that of a text for validation, which the model has not read.
    """
    if dataset.manifest and dataset.manifest.sources == (STDLIB,):
        return CODE_PROMPT
    for split in (VAL, TRAIN):
        if split in dataset.splits and dataset.splits[split].tokens:
            for found in first_documents(dataset, tokenizer, split, max_tokens=PROMPT_TOKENS):
                for line in found.text.splitlines():
                    if prompt := _beginning(line):
                        return prompt
    return ""


def _beginning(line: str) -> str:
    """The first words of a line; letters alone, so that it can be typed and printed."""
    printable = "".join(letter for letter in line.strip() if letter.isprintable())
    line = printable.replace("\ufffd", "").strip()
    if len(line) <= PROMPT_CHARACTERS:
        return line
    cut = line.rfind(" ", 0, PROMPT_CHARACTERS + 1)
    return line[:cut] if cut > 0 else line[:PROMPT_CHARACTERS]
