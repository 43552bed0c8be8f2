"""A corpus made into a dataset: three streams over the text, none of which holds it in memory.

1. Scan: hash every document. That gives the source fingerprint and the rule of the splits, and
   finds whatever is wrong with the input before anything is written.
2. Learn the tokenizer from training documents alone (only `bpe:N` needs this stream).
3. Encode on all cores, into shards of a fixed number of tokens that are written as they fill: a
   thread reads ahead, another encodes, and the main one hashes and writes.

Work happens in `<out>.partial`, where a journal keeps the scan, the tokenizer and every finished
shard. A killed build goes on from there and ends in the same bytes; the folder takes its real name
in one rename, after its manifest is on disk.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from speedrun.data.corpus import MAX_DOCUMENT_BYTES, Corpus, open_corpus
from speedrun.data.dataset import MANIFEST, TOKENIZER, Manifest, SplitInfo
from speedrun.data.journal import JOURNAL, BuildOptions, Journal, Scan
from speedrun.data.shards import SHARD_TOKENS, ShardInfo, ShardWriter
from speedrun.data.splits import TEST, TRAIN, VAL, Sides, kept_apart
from speedrun.data.staging import empty, is_empty, locked_folder, swap_in
from speedrun.data.stream import Hashed, ProgressCallback, batches, hashed, read_ahead, taking_turns
from speedrun.data.tokenizer import (
    TokenIds,
    Tokenizer,
    TokenizerSpec,
    create_tokenizer,
    load_tokenizer,
    parse_spec,
)
from speedrun.errors import ConfigError, DataError, SpeedrunError
from speedrun.files import parse_json, write_atomically

BUILD = "build.json"
# A BPE learns from a sample of about this much text, or 4 KiB per id if that is more. On the 31 MB
# of the standard library, half the text teaches bpe:4096 in 3 s, not 6 s, for 0.6% more tokens.
BPE_SAMPLE_BYTES = 16 << 20
BPE_SAMPLE_BYTES_PER_ID = 4 << 10
FRACTION = 0.05  # of the documents, for validation and for the test
# A small text gives more, for a loss on a few words says nothing: bytes to come near, and the share
# that is the most.
ENOUGH = {VAL: (2_048, 0.2), TEST: (1_024, 0.1)}
COPIES = "documents left out, for held-out files have them too"
HELD_OUT = "training documents left out, for validation or the test has them too"


def build_dataset(
    sources: Sequence[str],
    out: Path,
    tokenizer: str,
    *,
    held_out: Mapping[str, Sequence[str]] | None = None,
    val_fraction: float | None = FRACTION,
    test_fraction: float | None = FRACTION,
    shard_tokens: int = SHARD_TOKENS,
    text_field: str = "text",
    max_document_bytes: int | None = None,
    progress: ProgressCallback = lambda *_: None,
    force: bool = False,
    wait: bool = False,
) -> Manifest:
    """Make `out` a dataset of the sources, or return it unchanged if it is that already.

    A folder that holds another dataset is replaced only with `force`. A second build of the same
    folder is refused while one is running, or with `wait` takes its turn.

    `held_out` names sources that are "val" or "test" alone. With files of its own a split takes
    nothing of the sources, and who names files for validation but none for a test has no test.
    Fractions and a document limit of None follow from the size of the text.
    """
    named = {split: files for split, files in (held_out or {}).items() if files}
    corpus = open_corpus(sources, held_out=named, text_field=text_field,
                         max_document_bytes=max_document_bytes)  # fmt: skip
    asked = {"val_fraction": val_fraction, "test_fraction": test_fraction,
             "max_document_bytes": max_document_bytes}  # fmt: skip
    by_size = [name for name, value in asked.items() if value is None]
    val_fraction = _fraction(val_fraction, VAL, corpus.total_bytes)
    test_fraction = _fraction(test_fraction, TEST, corpus.total_bytes)
    if not 0 < val_fraction < 1:
        raise ConfigError(
            f"a validation fraction of {val_fraction} is not between 0 and 1: use 0.05, say"
        )
    if not 0 <= test_fraction < 1 - val_fraction:
        raise ConfigError(
            f"a test fraction of {test_fraction} leaves nothing to train on beside a validation "
            f"fraction of {val_fraction}: lower one of them"
        )
    spec, options = checked_options(
        tokenizer,
        0.0 if VAL in named else val_fraction,
        0.0 if named else test_fraction,
        shard_tokens,
        text_field,
        corpus.max_document_bytes,
    )
    out = out.expanduser().resolve()
    if not out.name:
        raise ConfigError(f"{out} cannot become a dataset: name a folder in it")
    with locked_folder(out.with_name(out.name + ".partial"), wait) as partial:
        if not force and (existing := _existing(out, options, by_size)) is not None:
            if _scan(corpus, options, progress).fingerprint == existing.source_fingerprint:
                return existing
            raise DataError(
                f"{out} is a dataset of other text: use --force to replace it, or another folder"
            )
        # Never delete what is not a dataset, whatever `force` says.
        if out.exists() and not (out / MANIFEST).exists() and not is_empty(out):
            raise DataError(f"{out} exists and is not a dataset: choose another folder")
        if (finished := _existing(partial, options, strict=False)) is None or (
            _scan(corpus, options, progress).fingerprint != finished.source_fingerprint
        ):
            _build(corpus, spec, options, partial, progress)
        (partial / JOURNAL).unlink(missing_ok=True)
        swap_in(partial, out)
    return Manifest.load(out)


def _fraction(given: float | None, split: str, size: int) -> float:
    if given is not None:
        return given
    enough, most = ENOUGH[split]
    return min(most, max(FRACTION, enough / size)) if size else FRACTION


def build_notes(folder: Path) -> list[str]:
    """What a build left out, cut or sampled, as short lines; none for other folders of shards."""
    try:
        notes = parse_json((folder / BUILD).read_bytes())["notes"]
        return [f"{count:,} {what}" for what, count in sorted(notes.items()) if count]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise DataError(f"{folder / BUILD} is damaged: build the dataset again") from None


def checked_options(
    tokenizer: str,
    val_fraction: float,
    test_fraction: float,
    shard_tokens: int = SHARD_TOKENS,
    text_field: str = "text",
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
) -> tuple[TokenizerSpec, BuildOptions]:
    spec = parse_spec(tokenizer)
    if shard_tokens < 1:
        raise ConfigError(f"shards of {shard_tokens} tokens cannot be: use at least 1")
    options = BuildOptions(
        str(spec), val_fraction, test_fraction, shard_tokens, text_field, max_document_bytes
    )
    return spec, options


def _build(
    corpus: Corpus,
    spec: TokenizerSpec,
    options: BuildOptions,
    folder: Path,
    report: ProgressCallback,
) -> None:
    """Fill `folder`, from where its journal says, and end by writing the manifest."""
    journal = Journal.load(folder, corpus.stamp(), options)
    try:
        if journal.scan is None:
            journal.scan = _scan(corpus, options, report)
            journal.save(folder)
        tokenizer = _stored_tokenizer(folder, journal)
        if tokenizer is None:
            journal.drop_shards(folder)
            texts = _training_texts(corpus, spec, journal.scan, report)
            tokenizer = create_tokenizer(spec.for_text(journal.scan.bytes), texts)
            tokenizer.save(folder / TOKENIZER)
            journal.tokenizer = tokenizer.fingerprint
            journal.save(folder)
        splits = _encode(corpus, tokenizer, journal, folder, report)
    except SpeedrunError:  # after a mistake, keep the folder only if finished shards are in it
        if not journal.has_shards:
            empty(folder)
        raise
    record = {"options": asdict(options), "notes": journal.scan.notes}
    write_atomically(folder / BUILD, json.dumps(record, indent=1).encode())
    Manifest(
        tokenizer=tokenizer.spec,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eot=tokenizer.eot,
        sources=corpus.names,
        source_fingerprint=journal.scan.fingerprint,
        splits=splits,
    ).save(folder)


def _scan(corpus: Corpus, options: BuildOptions, report: ProgressCallback) -> Scan:
    notes: Counter[str] = Counter()
    documents = size = 0
    fingerprint = hashlib.sha256()
    sides = Sides(options.val_fraction, options.test_fraction, corpus.cuts)
    for document in without_copies(hashed(corpus, "scan", report, notes), notes):
        documents += 1
        size += document.bytes
        fingerprint.update(document.hash + document.side.encode())
        sides.add(document)
    for side in {source.side for source in corpus.sources} - {"", *sides.named}:
        raise DataError(f"the files named for {side} hold no text of their own: name others")
    spec = parse_spec(options.tokenizer)
    if spec.kind == "bpe" and size > (sample := _sample_bytes(spec)):
        notes["MiB of training documents, drawn by hash, to learn the BPE"] = sample >> 20
    rule = sides.rule()
    if repeated := sides.repeated():  # only now it is known on which side each of them is
        rule = kept_apart(rule, without_copies(hashed(corpus, "scan", report)), repeated)
        notes[HELD_OUT] = sum(rule.copies.values())
    return Scan(documents, size, fingerprint.hexdigest(), rule, dict(+notes))


def without_copies(
    documents: Iterator[Hashed], notes: Counter[str] | None = None
) -> Iterator[Hashed]:
    """The documents but for copies of what held-out files hold, which come before all others."""
    held_out: dict[bytes, str] = {}
    for document in documents:
        if document.side:
            side = held_out.setdefault(document.hash, document.side)
        else:
            side = held_out.get(document.hash, "")
        if side == document.side:
            yield document
        elif notes is not None:
            notes[COPIES] += 1


def _sample_bytes(spec: TokenizerSpec) -> int:
    return max(BPE_SAMPLE_BYTES, BPE_SAMPLE_BYTES_PER_ID * spec.size)


def _training_texts(
    corpus: Corpus, spec: TokenizerSpec, scan: Scan, report: ProgressCallback
) -> Iterator[str]:
    """Training documents, or a sample of them: another part of the hash decides, so it is fair."""
    sample = _sample_bytes(spec)
    bound = 2**64 * sample // max(scan.bytes, sample)
    for document in without_copies(hashed(corpus, "tokenizer", report)):
        drawn = int.from_bytes(document.hash[8:16], "big") < bound
        if drawn and scan.rule.split_of(document) == TRAIN:
            yield document.text


def _encode(
    corpus: Corpus, tokenizer: Tokenizer, journal: Journal, folder: Path, report: ProgressCallback
) -> dict[str, SplitInfo]:
    scan = journal.scan
    assert scan is not None
    documents, size, fingerprint = Counter[str](), Counter[str](), hashlib.sha256()

    def encoded() -> Iterator[list[tuple[str, list[Hashed], list[TokenIds]]]]:
        documents_ahead = without_copies(hashed(corpus, "encode", report))
        for batch in read_ahead(batches(documents_ahead)):
            parts: dict[str, list[Hashed]] = {split: [] for split in output.begin}
            for document in batch:
                fingerprint.update(document.hash + document.side.encode())
                if not (split := scan.rule.split_of(document)):
                    continue
                documents[split] += 1
                size[split] += document.bytes
                if document.number >= output.begin[split][0]:
                    parts[split].append(document)
            texts = [document.text for part in parts.values() for document in part]
            ids = iter(tokenizer.encode_batch(texts))
            yield [(split, part, [*islice(ids, len(part))]) for split, part in parts.items()]

    with closing(_Output(folder, journal, tokenizer.eot)) as output, taking_turns():
        # One batch is hashed and written while the next one is encoded.
        for parts in read_ahead(encoded(), depth=1):
            for split, part, ids in parts:
                output.add(split, part, ids)
        if fingerprint.hexdigest() != scan.fingerprint:
            journal.drop_shards(folder)  # they mix two states of the sources
            raise DataError("the sources changed while they were being read: run the build again")
        if not documents[TRAIN]:
            journal.drop_shards(folder)
            raise DataError(
                "no document is left to train on: add documents, or lower the shares that are held "
                "out"
            )
        return {
            split: SplitInfo(
                sum(shard.tokens for shard in shards), documents[split], size[split], tuple(shards)
            )
            for split, shards in output.finish().items()
            if shards or split != TEST
        }


class _Output:
    """The shards of all splits; the journal hears of each that is finished."""

    def __init__(self, folder: Path, journal: Journal, eot: int) -> None:
        self._folder, self._journal = folder, journal
        self._eot = np.array([eot], np.uint16)
        self._writers = {
            split: ShardWriter(
                folder, split, shard_tokens=journal.options.shard_tokens, finished=state.shards
            )
            for split, state in journal.splits.items()
        }
        # Where each split goes on: read once, since the journal moves while documents are written.
        self.begin = {
            split: (state.document, state.offset) for split, state in journal.splits.items()
        }

    def add(self, split: str, documents: Sequence[Hashed], encoded: Sequence[TokenIds]) -> None:
        """Write some documents of a split, none of them before `begin`, in one stream."""
        if not documents:
            return
        ends = np.cumsum([1 + len(ids) for ids in encoded])
        stream = np.concatenate([part for ids in encoded for part in (self._eot, ids)])
        first, offset = self.begin[split]
        done = offset if documents[0].number == first else 0
        writer, state = self._writers[split], self._journal.splits[split]
        while done < len(stream):
            shards = len(writer.shards)
            begin, done = done, min(done + writer.room, len(stream))
            writer.add(stream[begin:done])
            if len(writer.shards) > shards:
                state.shards = list(writer.shards)
                last = int(np.searchsorted(ends, done))  # the document that fills the shard
                state.document = documents[last].number
                state.offset = done - int(ends[last]) + 1 + len(encoded[last])
                self._journal.save(self._folder)

    def finish(self) -> dict[str, list[ShardInfo]]:
        return {split: writer.finish() for split, writer in self._writers.items()}

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


def _stored_tokenizer(folder: Path, journal: Journal) -> Tokenizer | None:
    if journal.tokenizer is None:
        return None
    try:
        tokenizer = load_tokenizer(folder / TOKENIZER)
    except DataError:
        return None
    return tokenizer if tokenizer.fingerprint == journal.tokenizer else None


def _existing(
    folder: Path, options: BuildOptions, by_size: Sequence[str] = (), *, strict: bool = True
) -> Manifest | None:
    """The manifest of a whole dataset with these options; with other ones an error if `strict`.

    Options named in `by_size` follow from the size of the text: other ones mean other text.
    """
    if not (folder / MANIFEST).exists():
        return None
    try:
        stored: dict[str, Any] = parse_json((folder / BUILD).read_bytes())["options"]
        other = [name for name, value in asdict(options).items() if stored.get(name) != value]
        reason = f"made with {other[0]} {stored.get(other[0])}" if other else ""
        if other and other[0] in by_size:
            reason = f"of other text, or {reason}"
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        reason = "without a readable record of how it was built"
    if not reason:
        return Manifest.load(folder)
    if strict:
        raise DataError(
            f"{folder} holds a dataset {reason}: use --force to replace it, or another folder"
        )
    return None
