"""Which documents are trained on, which validate, and which are kept for the test.

The SHA-256 of a text decides, so adding, removing or reordering others never moves a document from
one side to another, and copies of a text stay together. A file that was cut into documents is one
text, for which the hash of its first part decides; so a part may be equal to a text on another
side, and what is held out is then left out of training. Files that a user names for validation or
test are that, whatever their hash; what is in them is left out of training likewise.

Two corners. A corpus so small that the hash leaves a split empty gives it the text of training
whose size is nearest to what the split should hold. A corpus that is one single file has to be cut:
its end is kept, first for validation, then for the test, so that the sides meet in two places only.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from speedrun.data.stream import Hashed
from speedrun.errors import DataError

TRAIN, VAL, TEST = SPLITS = ("train", "val", "test")
FEW = 1_000  # texts a small corpus has at most; of a larger one these are looked at to fill a split


@dataclass(frozen=True)
class SplitRule:
    """Decides about documents by themselves, in whatever order they come."""

    val_fraction: float
    test_fraction: float
    moved: Mapping[str, str] = field(default_factory=dict)  # split by hash, where the hash has none
    val_from: int | None = None  # in a corpus of one file: number of the first of validation,
    test_from: int | None = None  # and of the first of the test
    copies: Mapping[str, int] = field(default_factory=dict)  # hashes of training documents that are
    # held out too, with how many there are

    def split_of(self, document: Hashed) -> str:
        """None, which is "", for a copy in training of what is held out."""
        split = self._side_of(document)
        return "" if split == TRAIN and document.hash.hex() in self.copies else split

    def _side_of(self, document: Hashed) -> str:
        if document.side:
            return document.side
        if self.val_from is not None:
            if document.number < self.val_from:
                return TRAIN  # whatever its hash: the end alone is held out
            later = self.test_from is not None and document.number >= self.test_from
            return TEST if later else VAL
        return self.moved.get(document.text_hash.hex()) or self.by_hash(document.text_hash)

    def by_hash(self, text_hash: bytes) -> str:
        value = _begin(text_hash)
        if value < int(self.val_fraction * 2.0**64):
            return VAL
        return TEST if value < int((self.val_fraction + self.test_fraction) * 2.0**64) else TRAIN


class Sides:
    """Looks at every document once and ends in the rule for them.

    With `cuts`, in a corpus of which files may be cut, it keeps 8 bytes of each.
    """

    def __init__(self, val_fraction: float, test_fraction: float, cuts: bool = False) -> None:
        self._fractions = {VAL: val_fraction, TEST: test_fraction}
        self._plain = SplitRule(val_fraction, test_fraction)
        self.named: set[str] = set()  # splits that have files of their own
        self._texts: dict[bytes, int] = {}  # the first FEW, with their bytes
        self._splits: Counter[str] = Counter()
        self._wholes: set[int] = set()  # files and texts that are not cut, two at most
        # Number and bytes of the documents, while they are all of one file. Copies of what is held
        # out are not among them, so the numbers have gaps.
        self._parts: list[tuple[int, int]] = []
        self._documents = self._bytes = 0
        self._hashes = array("Q") if cuts else None
        self._cut = False  # whether a document has not the hash that decides about it

    def add(self, document: Hashed) -> None:
        if document.side:
            self.named.add(document.side)
            return
        if self._hashes is not None:
            self._hashes.append(_begin(document.hash))
            self._cut |= document.hash != document.text_hash
        self._documents += 1
        self._bytes += document.bytes
        if len(self._wholes) < 2:
            self._wholes.add(document.whole)
            self._parts.append((document.number, document.bytes))
        self._splits[self._plain.split_of(document)] += 1
        if document.text_hash in self._texts or len(self._texts) < FEW:
            seen = self._texts.get(document.text_hash, 0)
            self._texts[document.text_hash] = seen + document.bytes

    def rule(self) -> SplitRule:
        if not self._documents:
            raise DataError("held-out files have every document of the sources too: name others")
        wanted = [
            split
            for split, fraction in self._fractions.items()
            if fraction and split not in self.named
        ]
        if len(self._wholes) == 1 and wanted:
            return self._rule_of_one(wanted)
        if len(self._texts) == 1 and wanted:
            raise DataError(
                "all documents are equal, or parts of equal files, so none is left for validation: "
                "add others, or name files for it with --val"
            )
        sides = {text: self._plain.by_hash(text) for text in self._texts}
        goals = {**self._fractions, TRAIN: 1 - sum(self._fractions.values())}
        moved: dict[str, str] = {}
        for split in (VAL, TRAIN, TEST):  # a test is the first to be done without
            if self._splits[split] or split not in (TRAIN, *wanted):
                continue
            counts = Counter(sides.values())
            spare = [text for text, side in sides.items() if counts[side] > 1]
            if not spare and split != TEST:
                spare = [text for text, side in sides.items() if side == TEST]
            if spare:
                goal = goals[split] * self._bytes
                chosen = min(spare, key=lambda text: (abs(self._texts[text] - goal), text))
                sides[chosen] = moved[chosen.hex()] = split
        return SplitRule(self._plain.val_fraction, self._plain.test_fraction, moved)

    def repeated(self) -> set[int]:
        """With what the hashes begin that several documents have, where sides may share them."""
        if self._hashes is None or not (self._cut or len(self._wholes) == 1):
            return set()
        found, counts = np.unique(np.frombuffer(self._hashes, np.uint64), return_counts=True)
        return set(found[counts > 1].tolist())

    def _rule_of_one(self, wanted: Collection[str]) -> SplitRule:
        """The end of the one file, in documents: at least one for each split that can have it."""
        parts = [*self._parts]
        if len(parts) < 2:
            raise DataError(
                "the corpus is one single document, so none is left for validation: add documents, "
                "name files for it with --val, or lower the document limit so that a text file is "
                "cut into several"
            )
        begins: dict[str, int] = {}
        for split in (TEST, VAL):
            # One document is for training, and validation goes before a test.
            spare = len(parts) - 1 - (split == TEST and VAL in wanted)
            if split not in wanted or spare < 1:
                continue
            kept = 0
            while spare and kept < self._fractions[split] * self._bytes:
                begins[split], size = parts.pop()
                kept += size
                spare -= 1
        test_from = begins.get(TEST)
        return SplitRule(
            self._plain.val_fraction, self._plain.test_fraction, {},
            begins.get(VAL, test_from), test_from,
        )  # fmt: skip


def kept_apart(
    rule: SplitRule, documents: Iterable[Hashed], repeated: Collection[int]
) -> SplitRule:
    """The rule that leaves out of training what is held out too; it is among the `repeated`."""
    training, held_out, left = Counter[bytes](), set[bytes](), 0
    for document in documents:
        trained = rule.split_of(document) == TRAIN
        left += trained
        if _begin(document.hash) not in repeated:
            continue
        if trained:
            training[document.hash] += 1
        else:
            held_out.add(document.hash)
    copies = {text.hex(): count for text, count in training.items() if text in held_out}
    if copies and left == sum(copies.values()):
        raise DataError(
            "validation and the test have the text of every document for training too: add other "
            "text, or name files for them with --val and --test"
        )
    return replace(rule, copies=copies)


def _begin(text_hash: bytes) -> int:
    return int.from_bytes(text_hash[:8], "big")
