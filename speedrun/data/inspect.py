"""What a dataset holds, as plain data to print: totals of each split and its first documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speedrun.data.shards import Dataset

PREVIEW_TOKENS = 1 << 20  # how far into a split first documents are looked for: 2 MiB


@dataclass(frozen=True)
class SplitSummary:
    """Totals of a split; None where public shards do not say."""

    name: str
    shards: int
    tokens: int
    documents: int | None
    bytes: int | None

    @property
    def tokens_per_document(self) -> float | None:
        return self.tokens / self.documents if self.documents else None

    @property
    def bytes_per_token(self) -> float | None:
        return self.bytes / self.tokens if self.bytes is not None else None


@dataclass(frozen=True)
class Summary:
    folder: str
    tokenizer: str
    vocab_size: int
    eot: int
    sources: tuple[str, ...]
    fingerprint: str
    splits: tuple[SplitSummary, ...]


@dataclass(frozen=True)
class DocumentPreview:
    """The beginning of a document; `tokens` is its whole length, None if it runs out of view."""

    text: str
    tokens: int | None


def summarize(dataset: Dataset) -> Summary:
    splits = dataset.splits.values()
    return Summary(
        folder=str(dataset.folder),
        tokenizer=dataset.tokenizer_spec,
        vocab_size=dataset.vocab_size,
        eot=dataset.eot,
        sources=dataset.manifest.sources if dataset.manifest else (),
        fingerprint=dataset.fingerprint,
        splits=tuple(
            SplitSummary(s.name, len(s.paths), s.tokens, s.documents, s.bytes) for s in splits
        ),
    )


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
