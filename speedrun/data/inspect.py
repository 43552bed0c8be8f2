"""The first documents of a dataset, as plain data to print."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speedrun.data.dataset import Dataset

PREVIEW_TOKENS = 1 << 20  # how far into a split first documents are looked for: 2 MiB


@dataclass(frozen=True)
class DocumentPreview:
    """The beginning of a document; `tokens` is its whole length, None if it runs out of view."""

    text: str
    tokens: int | None


def first_documents(
    dataset: Dataset, split: str = "train", *, count: int = 3, max_tokens: int = 128
) -> list[DocumentPreview]:
    """The first documents of a split, each decoded up to `max_tokens` tokens.

    A public shard may open in the middle of a document; what precedes the first end-of-text token
    is passed over, unless there is nothing else.
    """
    held = dataset.split(split)
    tokens = held.head(min(PREVIEW_TOKENS, held.tokens), dataset.vocab_size)
    starts = np.flatnonzero(tokens == dataset.eot)
    if not len(starts):
        starts = np.array([-1])
    tokenizer = dataset.tokenizer()
    previews = []
    for start, end in zip(starts[:count], [*starts[1 : count + 1], None], strict=False):
        body = tokens[start + 1 : end]
        whole = end is not None or len(tokens) == held.tokens
        text = tokenizer.decode(body[:max_tokens])
        previews.append(DocumentPreview(text, len(body) if whole else None))
    return previews
