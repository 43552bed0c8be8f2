"""What an unfinished build knows, written whenever a piece of work is safely on disk.

A journal counts only for the very build it was started by, told by the options and by a stamp of
the source files. Shards it lists are hashed again before they are trusted.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from speedrun.data.shards import ShardInfo
from speedrun.data.splits import SPLITS, SplitRule
from speedrun.data.staging import empty
from speedrun.files import has_sha256, write_atomically

FORMAT = 2
JOURNAL = "journal.json"


@dataclass(frozen=True)
class BuildOptions:
    """With the text itself, everything that decides the bytes of a dataset."""

    tokenizer: str
    val_fraction: float
    test_fraction: float
    shard_tokens: int
    text_field: str
    max_document_bytes: int
    format: int = FORMAT


@dataclass(frozen=True)
class Scan:
    """What the first stream over the text finds out."""

    documents: int
    bytes: int
    fingerprint: str  # SHA-256 over the documents' hashes, in order
    rule: SplitRule
    notes: dict[str, int]


@dataclass
class SplitState:
    """How far a split is on disk: up to `offset` tokens of document number `document`."""

    shards: list[ShardInfo] = field(default_factory=list)
    document: int = 0
    offset: int = 0


def _nothing_written() -> dict[str, SplitState]:
    return {split: SplitState() for split in SPLITS}


@dataclass
class Journal:
    """The state of a build, in the order in which it comes about."""

    stamp: str
    options: BuildOptions
    scan: Scan | None = None
    tokenizer: str | None = None  # its fingerprint
    splits: dict[str, SplitState] = field(default_factory=_nothing_written)

    @property
    def has_shards(self) -> bool:
        return any(state.shards for state in self.splits.values())

    def save(self, folder: Path) -> None:
        write_atomically(folder / JOURNAL, json.dumps(asdict(self)).encode())

    def drop_shards(self, folder: Path) -> None:
        self.splits = _nothing_written()
        for path in folder.glob("*.bin"):
            path.unlink()

    @staticmethod
    def load(folder: Path, stamp: str, options: BuildOptions) -> "Journal":
        """The journal in `folder` if it is of this build; otherwise a new one, and no files."""
        for leftover in folder.rglob("*.tmp"):
            leftover.unlink()
        try:
            journal = TypeAdapter(Journal).validate_json((folder / JOURNAL).read_bytes())
        except (OSError, ValidationError):
            journal = None
        if journal is None or (journal.stamp, journal.options) != (stamp, options):
            empty(folder)
            return Journal(stamp, options)
        shards = [shard for state in journal.splits.values() for shard in state.shards]
        if any(not has_sha256(folder / shard.file, shard.sha256) for shard in shards):
            journal.drop_shards(folder)
        return journal
