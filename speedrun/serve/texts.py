"""What a run is judged on: files, folders, globs, corpora and datasets, as documents of token ids.

A document is what the readers of a corpus yield, but that a text file is never cut: it is one
document, read and encoded a piece at a time, so that only its ids are ever in memory together. The
documents of a dataset come as they are stored where its tokenizer is the run's; else they are
decoded and encoded anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from speedrun.data.corpus import (
    BLANK,
    BUILT_IN,
    WHOLE,
    Corpus,
    HubSource,
    Notes,
    SourceFile,
    open_corpus,
)
from speedrun.data.dataset import MANIFEST, Dataset
from speedrun.data.find import open_dataset
from speedrun.data.readers import COMPRESSIONS, format_of, read_text
from speedrun.data.shards import TOKEN_DTYPE, Split, Tokens, read_tokens
from speedrun.data.splits import SPLITS, TEST, TRAIN, VAL
from speedrun.data.tokenizer import Tokenizer
from speedrun.errors import ConfigError, DataError, quoted
from speedrun.serve.load import LoadedRun

PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Text:
    """One document as a tokenizer encodes it."""

    file: str  # as it was named
    ids: Tokens  # end-of-text, then the text
    bytes: int  # of its UTF-8
    read: int  # bytes on disk that it took, for a progress bar


@dataclass(frozen=True)
class _Held:
    """One split of a dataset."""

    name: str
    dataset: Dataset
    split: Split


class Texts:
    """What was named on the command line; it may be gone through any number of times."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        split: str = "",
        text_field: str = "text",
        runs: Sequence[LoadedRun] = (),
    ) -> None:
        """`split` is that of datasets, by default val; the test of a run's own is refused."""
        self._parts: list[Corpus | _Held] = []
        self.names = names
        for name in names:
            if is_dataset(name):
                held = _held(Path(name), split or VAL, runs)
                if any(isinstance(part, _Held) and part.name == held.name for part in self._parts):
                    held = replace(held, name=f"{name.rstrip('/')}/{held.split.name}")
                self._parts.append(held)
            else:
                self._parts.append(_corpus(name, text_field))
        if split and not any(isinstance(part, _Held) for part in self._parts):
            raise ConfigError(
                f"--split {split} is for datasets, and none is named: leave it out, or name a "
                "folder that `speedrun data build` made"
            )
        self._refuse_copies()

    @property
    def total_bytes(self) -> int:
        """On disk, for a progress bar; what is streamed from a hub counts as none."""
        return sum(
            part.total_bytes
            if isinstance(part, Corpus)
            else part.split.tokens * TOKEN_DTYPE.itemsize
            for part in self._parts
        )

    def documents(self, tokenizer: Tokenizer, notes: Notes | None = None) -> Iterator[Text]:
        """Every document that has text, in order; `notes` counts what was left out."""
        notes = Counter() if notes is None else notes
        seen: set[bytes] = set()
        some = False
        for part in self._parts:
            found = (
                _from_corpus(part, tokenizer, notes, seen)
                if isinstance(part, Corpus)
                else _from_dataset(part, tokenizer, notes)
            )
            for text in found:
                yield text
                some = True
        if not some:
            raise DataError(f"no document of {', '.join(self.names)} has any text: name others")

    def _refuse_copies(self) -> None:
        """A document that counts twice makes errors look smaller than they are."""
        paths: Counter[Path] = Counter()
        for part in self._parts:
            if isinstance(part, Corpus):
                paths.update(
                    source.path.resolve()
                    for source in part.sources
                    if isinstance(source, SourceFile)
                )
            else:
                paths[part.dataset.folder.resolve()] += 1
        twice = next((path for path, count in paths.items() if count > 1), None)
        if twice:
            raise DataError(f"{twice.name} is named twice, by itself or in a folder: name it once")


def is_dataset(name: str) -> bool:
    """A folder with a manifest, with public shards, or left by a build that did not finish."""
    folder = Path(name).expanduser()
    return folder.is_dir() and (
        (folder / MANIFEST).exists()
        or folder.suffix == ".partial"
        or any(True for side in (TRAIN, VAL) for _ in folder.glob(f"*_{side}_*.bin"))
    )


def _held(folder: Path, split: str, runs: Sequence[LoadedRun]) -> _Held:
    folder = folder.expanduser()
    if split not in SPLITS:
        raise ConfigError(f"--split {quoted(split)} is not known: use {', '.join(SPLITS)}")
    fingerprint = Dataset.open(folder).fingerprint  # opens no file of the test
    for run in runs:
        own = run.trained.checkpoint.meta.get("dataset_fingerprint") == fingerprint
        if own and split == TEST:
            raise DataError(
                f"{folder} is what {run.run.path} was trained on, and its test is looked at by "
                f"`speedrun verify {run.run.path}` alone, which remembers every look: name another "
                "split, or other text"
            )
    dataset = open_dataset(folder, (split,))
    return _Held(f"{folder.resolve().name}/{split}", dataset, dataset.split(split))


def _corpus(name: str, text_field: str) -> Corpus:
    """A file that is named by itself is text, unless its ending says otherwise."""
    path = Path(name).expanduser()
    known = name in BUILT_IN or not path.is_file() or format_of(path) or not path.stat().st_size
    if known:
        return open_corpus([name], text_field=text_field, max_document_bytes=WHOLE)
    compression = COMPRESSIONS.get(path.suffix.lower())
    file = SourceFile(Path(), str(path), "", "text", compression, path.stat().st_size)
    return Corpus((path.name,), (file,), text_field, WHOLE)


def _name(source: SourceFile | HubSource) -> str:
    """As it was given: a machine's own paths are added to none."""
    if isinstance(source, HubSource):
        config = f"@{source.config}" if source.config else ""
        return f"hf:{source.name}{config}:{source.split}"
    return source.name if source.source in BUILT_IN else str(source.path)


def _from_corpus(
    corpus: Corpus, tokenizer: Tokenizer, notes: Notes, seen: set[bytes]
) -> Iterator[Text]:
    notes.update(corpus.other_files)
    for source in corpus.sources:
        file = _name(source)
        if isinstance(source, SourceFile) and source.kind == "text":
            yield from _from_file(source, file, tokenizer, notes)
            continue
        before = 0
        for document in corpus.documents_of(source, notes, seen):
            ids = _opened(tokenizer, [tokenizer.encode(document.text)])
            yield Text(file, ids, _utf8_bytes(document.text), document.read - before)
            before = document.read


def _from_file(source: SourceFile, file: str, tokenizer: Tokenizer, notes: Notes) -> Iterator[Text]:
    parts: list[Tokens] = []
    size, blank = 0, True
    pieces = (one.text for one in read_text(source.path, source.compression, PIECE_BYTES))
    for piece in whole_words(pieces):
        parts.append(tokenizer.encode(piece))
        size += _utf8_bytes(piece)
        blank = blank and piece.isspace()
    if blank:
        notes[BLANK] += 1
    else:
        yield Text(file, _opened(tokenizer, parts), size, source.size)


def whole_words(pieces: Iterable[str]) -> Iterator[str]:
    """The same text in pieces that are encoded as the whole would be.

    They end before white space that follows something else. There a word of every tokenizer ends:
    none has white space but at its beginning, or is white space throughout. Looking ahead, as those
    of white space do, is over where something else stands, and looking back none does.
    """
    held: list[str] = []
    for piece in pieces:
        cut = _last_word_end(piece)
        if cut:
            yield "".join((*held, piece[:cut]))
            held = []
        held.append(piece[cut:])
    if held:
        yield "".join(held)


def _last_word_end(piece: str) -> int:
    """Where the last white space after something else begins; 0: nowhere."""
    for end in range(len(piece) - 1, 0, -1):
        if piece[end].isspace() and not piece[end - 1].isspace():
            return end
    return 0


def _from_dataset(held: _Held, tokenizer: Tokenizer, notes: Notes) -> Iterator[Text]:
    dataset = held.dataset
    same = dataset.tokenizer_fingerprint == tokenizer.fingerprint
    theirs = tokenizer if same else dataset.tokenizer()
    sizes = theirs.token_bytes()
    for number, ids in enumerate(documents_in(held.split, dataset.vocab_size, dataset.eot), 1):
        read = TOKEN_DTYPE.itemsize * (len(ids) + 1)
        if not len(ids):
            notes[BLANK] += 1
        elif same:
            yield Text(held.name, _opened(tokenizer, [ids]), int(sizes[ids].sum()), read)
        else:
            try:
                text = theirs.decode_bytes(ids.tolist()).decode()
            except UnicodeDecodeError:
                raise DataError(
                    f"document {number} of {held.name} is not UTF-8 when {theirs.spec} decodes it: "
                    "it cannot be encoded for a run with another tokenizer, so leave it out"
                ) from None
            yield Text(held.name, _opened(tokenizer, [tokenizer.encode(text)]),
                       _utf8_bytes(text), read)  # fmt: skip


def documents_in(split: Split, vocab_size: int, eot: int) -> Iterator[Tokens]:
    """The tokens of each document without end-of-text; a document may go on in the next shard.

    What stands before the first end-of-text, in public shards that were cut, is a document too.
    """
    rest: list[Tokens] = []
    for path in split.paths:
        tokens = read_tokens(path, vocab_size=vocab_size)
        begin = 0
        for opening in np.flatnonzero(tokens == eot):
            rest.append(tokens[begin:opening])
            if begin or path != split.paths[0] or opening:  # nothing stands before the first
                yield np.concatenate(rest)
            rest, begin = [], int(opening) + 1
        rest.append(tokens[begin:].copy())
    yield np.concatenate(rest)


def _opened(tokenizer: Tokenizer, parts: Sequence[Tokens]) -> Tokens:
    return np.concatenate([np.array([tokenizer.eot], TOKEN_DTYPE), *parts])


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
