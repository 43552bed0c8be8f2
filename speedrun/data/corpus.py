"""Where text comes from: the standard library, files, folders, globs, Hugging Face datasets.

A corpus is a list of files in a fixed order (sources as given, files of a folder or glob sorted)
that can be streamed any number of times, each time the same documents. Which of them are trained
on is decided in `splits.py`.
"""

import difflib
import glob
import hashlib
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from speedrun.data.docstrings import DOCSTRINGS, docstring_files, read_docstrings
from speedrun.data.readers import (
    Document,
    first_line,
    format_of,
    read_jsonl,
    read_parquet,
    read_text,
    text_of,
)
from speedrun.errors import ConfigError, DataError, quoted
from speedrun.files import sha256_of

STDLIB = "stdlib"
BUILT_IN = (STDLIB, DOCSTRINGS)
HUB = "hf:"
MAX_DOCUMENT_BYTES = 65_536
MIN_DOCUMENT_BYTES = 1_024
WHOLE = 1 << 40  # a document limit no file reaches
# A corpus of one file has to be cut, so that its end can be held out: into so many parts, or fewer.
PARTS = 18
SMALLEST_PART = 32

# What a reader should know about a pass over the corpus: how often each of these came up.
Notes = Counter[str]
BLANK = "blank documents left out"
NOT_UTF8 = "standard library files that are not UTF-8 left out"
OTHER_FILES = "files of other kinds left out"
CUT = "text files cut at line ends"
ONE_TEXT = ("text", DOCSTRINGS)  # kinds of files whose documents all stay on one side of a split


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a corpus and how to read it.

    A folder may hold a million of them, so each has little more than a name of its own. With a
    `Path` in each, finding the files took 1.2 KB of memory apiece; so it takes 0.3 KB.
    """

    home: Path
    below: str  # the path from `home`
    source: str  # what `name` begins with, nothing for a file that is named by itself
    kind: str  # text, jsonl, parquet, docstrings, or stdlib: never cut, left out when not UTF-8
    compression: str | None
    size: int
    side: str = ""  # the split it was named for

    @property
    def path(self) -> Path:
        return self.home / self.below

    @property
    def name(self) -> str:
        """Relative to its source, so free of this machine's paths."""
        return f"{self.source}/{self.below}" if self.source else Path(self.below).name


@dataclass(frozen=True)
class HubSource:
    """`hf:NAME[@CONFIG][:SPLIT]`, streamed from the Hugging Face hub."""

    name: str
    config: str | None
    split: str
    side: str = ""


@dataclass(frozen=True)
class Corpus:
    """Documents that can be streamed again and again in the same order."""

    names: tuple[str, ...]
    sources: tuple[SourceFile | HubSource, ...]
    text_field: str
    max_document_bytes: int
    other_files: Notes = field(default_factory=Counter)

    @property
    def total_bytes(self) -> int:
        """Bytes on disk, for a progress bar; hub sources count as none."""
        return sum(source.size for source in self.sources if isinstance(source, SourceFile))

    @property
    def packed(self) -> bool:
        """Whether bytes on disk are not those of the text."""
        files = [source for source in self.sources if isinstance(source, SourceFile)]
        return any(file.compression or file.kind == "parquet" for file in files)

    @property
    def cuts(self) -> bool:
        """Whether it has files that may become several documents of one text."""
        kinds = {source.kind for source in self.sources if isinstance(source, SourceFile)}
        return not kinds.isdisjoint(ONE_TEXT)

    def documents(self, notes: Notes | None = None) -> Iterator[Document]:
        """Stream every document that has text; `notes` counts what was left out or cut.

        A document's `read` counts from the start of the corpus.
        """
        notes = Counter() if notes is None else notes
        notes.update(self.other_files)
        before, some = 0, False
        seen: set[bytes] = set()
        for source in self.sources:
            for document in self.documents_of(source, notes, seen):
                yield document._replace(read=before + document.read)
                some = True
            before += source.size if isinstance(source, SourceFile) else 0
        if not some:
            raise DataError(f"no document of {', '.join(self.names)} has any text: name others")

    def documents_of(
        self, source: SourceFile | HubSource, notes: Notes, seen: set[bytes]
    ) -> Iterator[Document]:
        """Those of one source; `seen` are the paragraphs of docstrings that came before."""
        count, whole = 0, isinstance(source, HubSource) or source.kind not in ONE_TEXT
        first = True
        for document in self._read(source, notes, seen):
            count += 1
            if not document.text or document.text.isspace():
                notes[BLANK] += 1
                continue
            yield Document(document.text, document.read, first, source.side)
            first = whole
        if isinstance(source, SourceFile):
            notes[CUT] += source.kind == "text" and count > 1
            notes[BLANK] += source.size == 0

    def stamp(self) -> str:
        """Changes when a file is added, removed or written to; costs one stat per file."""
        return self._digest(
            lambda file: f"{file.path.resolve()} {file} {_stat(file.path).st_mtime_ns}"
        )

    def content_hash(self) -> str:
        """Depends on what the files hold and not on where they are; reads them all."""
        return self._digest(lambda file: f"{file.name} {sha256_of(file.path)} {file.side}".rstrip())

    def _digest(self, line_of: Callable[[SourceFile], str]) -> str:
        digest = hashlib.sha256()
        for source in self.sources:
            line = line_of(source) if isinstance(source, SourceFile) else repr(source)
            digest.update(f"{line}\n".encode())
        return digest.hexdigest()

    def _read(
        self, source: SourceFile | HubSource, notes: Notes, seen: set[bytes]
    ) -> Iterator[Document]:
        if isinstance(source, HubSource):
            return _read_hub(source, self.text_field)
        path, compression = source.path, source.compression
        if source.kind == "jsonl":
            return read_jsonl(path, compression, self.text_field)
        if source.kind == "parquet":
            return read_parquet(path, self.text_field)
        if source.kind == "stdlib":
            return _read_stdlib(path, notes)
        if source.kind == DOCSTRINGS:
            return read_docstrings(path, seen)
        return read_text(path, compression, self.max_document_bytes)


def open_corpus(
    sources: Sequence[str],
    *,
    held_out: Mapping[str, Sequence[str]] | None = None,
    text_field: str = "text",
    max_document_bytes: int | None = MAX_DOCUMENT_BYTES,
) -> Corpus:
    """Find the files behind `sources`; what is missing, empty or of no known kind is refused here.

    `held_out` names sources for one split alone, "val" or "test"; they are read before the others,
    so that copies of what they hold can be left out of training. A file of theirs that is in a
    folder or glob of the sources too is held out.

    A source is `stdlib`, `docstrings`, a file, a folder (read with its subfolders, hidden names
    left out), a glob (`**` for any depth) or `hf:NAME[@CONFIG][:SPLIT]`. File names say how a file
    is read: JSON lines (.jsonl, .ndjson), .parquet, or text (.txt, .md, .py and other usual
    endings); all but parquet may be compressed (.gz, .zst). Other files in folders are left out and
    counted. A document limit of None is the usual one, or less for a single small file.
    """
    if not sources:
        raise ConfigError("no source is given: name files, folders, globs, hf:NAME or stdlib")
    if max_document_bytes is not None and max_document_bytes < MIN_DOCUMENT_BYTES:
        raise ConfigError(
            f"a document limit of {max_document_bytes} bytes is too small: "
            f"use at least {MIN_DOCUMENT_BYTES}"
        )
    found: list[SourceFile | HubSource] = []
    other_files: Notes = Counter()
    named = [
        (source, side)
        for side in ("test", "val")
        for source in (held_out or {}).get(side, ())
    ]  # fmt: skip
    for source, side in named:
        found += [replace(one, side=side) for one in _find(source, other_files)]
    held = {one.path.resolve() for one in found if isinstance(one, SourceFile)}
    for source in sources:
        some = _find(source, other_files)
        if held and not Path(source).expanduser().is_file():
            some = [one for one in some if not _is_in(one, held)]
        found += some
    if twice := _reached_twice([source for source in found if isinstance(source, SourceFile)]):
        hint = ", or for training its folder, of which held-out files are left out" if held else ""
        raise DataError(f"{twice} is reached by two sources: name it once{hint}")
    names = (
        *(_name(source) for source in sources),
        *(
            f"{_name(source)} for {side} alone"
            for side in ("val", "test")
            for source in (held_out or {}).get(side, ())
        ),
    )
    limit = _document_limit(found) if max_document_bytes is None else max_document_bytes
    return Corpus(names, tuple(found), text_field, limit, other_files)


def _document_limit(sources: Sequence[SourceFile | HubSource]) -> int:
    first = sources[0]
    if len(sources) > 1 or isinstance(first, HubSource) or first.kind != "text":
        return MAX_DOCUMENT_BYTES
    return min(MAX_DOCUMENT_BYTES, max(SMALLEST_PART, first.size // PARTS))


def _name(source: str) -> str:
    """A source as it is told: the name of a file or folder, a pattern with the folder it is in."""
    if source in BUILT_IN or source.startswith(HUB):
        return source
    path = Path(source).expanduser()
    if path.exists() or not glob.has_magic(source):
        return path.resolve().name or source
    parts = path.parts
    first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    home = Path(*parts[:first]).resolve().name
    return "/".join([*([home] if first else []), *parts[first:]])


def _find(source: str, other_files: Notes) -> list[SourceFile | HubSource]:
    if source == STDLIB:
        return [*_stdlib_files()]
    if source == DOCSTRINGS:
        return [
            SourceFile(home, name, library, DOCSTRINGS, None, _stat(home / name).st_size)
            for home, name, library in docstring_files()
        ]
    if source.startswith(HUB):
        return [_hub_source(source)]
    path = Path(source).expanduser()
    if path.is_dir():
        return [*_folder_files(path, other_files)]
    if not path.exists() and glob.has_magic(source):
        matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 (any pattern is valid)
        files = [_source_file(Path(), match) for match in matches if Path(match).is_file()]
        if not files:
            raise DataError(f"no file matches {quoted(source)}: check the pattern and the folder")
        return [*files]
    if not path.exists():
        raise DataError(f"there is no file, folder or corpus {quoted(source)}{_near(path)}")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty: name a file that holds text")
    return [_source_file(Path(), str(path))]


def _is_in(source: SourceFile | HubSource, paths: Collection[Path]) -> bool:
    return isinstance(source, SourceFile) and source.path.resolve() in paths


def _reached_twice(files: Sequence[SourceFile]) -> Path | None:
    """A file that is there twice. All paths are held at once only if two of them may be equal."""
    hashes = np.fromiter((hash(file.path.resolve()) for file in files), np.int64, len(files))
    if len(np.unique(hashes)) == len(files):
        return None
    counts = Counter(file.path.resolve() for file in files)
    return next((path for path, count in counts.items() if count > 1), None)


def _source_file(home: Path, below: str, source: str = "") -> SourceFile:
    path = home / below
    file_format = format_of(path)
    if file_format is None:
        raise DataError(
            f"{path} has an ending that does not say how to read it: use .txt, .md, .py and the "
            "like for text, .jsonl (also .gz, .zst) or .parquet, renaming a copy if need be"
        )
    return SourceFile(home, below, source, *file_format, _stat(path).st_size)


def _folder_files(folder: Path, other_files: Notes) -> Iterator[SourceFile]:
    names = [path for path in _walk(folder) if not path.rpartition("/")[2].startswith(".")]
    known = [name for name in names if format_of(Path(name))]
    if not known:
        raise DataError(
            f"{folder} holds no file this can read among {len(names)}: text, .jsonl or .parquet"
        )
    other_files[OTHER_FILES] += len(names) - len(known)
    source = folder.resolve().name
    for name in known:
        yield _source_file(folder, name, source)


def _walk(folder: Path, leave_out: str = r"\..*") -> list[str]:
    """Files below `folder` as sorted relative names, without folders that match `leave_out`."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not re.fullmatch(leave_out, name)]
        above = Path(parent).relative_to(folder)
        found += [(above / name).as_posix() for name in files]
    return sorted(found)


def _stdlib_files() -> Iterator[SourceFile]:
    """The running interpreter's own .py files; what installing it generated is left out."""
    home = Path(sysconfig.get_paths()["stdlib"])
    for name in _walk(home, r"site-packages|dist-packages|__pycache__|config-.*"):
        path = home / name
        if name.endswith(".py") and not path.name.startswith("_sysconfigdata"):
            yield SourceFile(home, name, STDLIB, "stdlib", None, _stat(path).st_size)


def _read_stdlib(path: Path, notes: Notes) -> Iterator[Document]:
    try:
        yield from list(read_text(path, None, WHOLE))
    except DataError:  # a handful of test files are in other encodings, on purpose
        notes[NOT_UTF8] += 1


def _hub_source(source: str) -> HubSource:
    match = re.fullmatch(r"hf:([^:@]+)(?:@([^:@]+))?(?::([^:@]+))?", source)
    if not match:
        raise ConfigError(
            f"source {quoted(source)} is not hf:NAME[@CONFIG][:SPLIT], as in "
            "hf:roneneldan/TinyStories"
        )
    return HubSource(match[1], match[2], match[3] or "train")


def _read_hub(source: HubSource, text_field: str) -> Iterator[Document]:
    try:
        import datasets
    except ModuleNotFoundError:
        raise ConfigError(
            f"hf:{source.name} needs the hub extra: pip install 'speedrun[hub]'"
        ) from None
    row = read = 0
    try:
        rows = datasets.load_dataset(source.name, source.config, split=source.split, streaming=True)
        for record in rows:
            row += 1
            text = text_of(record, text_field, f"hf:{source.name}, row {row}")
            read += len(text)
            yield Document(text, read)
    except (OSError, ValueError) as error:
        raise DataError(
            f"hf:{source.name} cannot be read after row {row} ({first_line(error)}): check the "
            "name, the split and the connection"
        ) from None


def _near(path: Path) -> str:
    around = [*BUILT_IN]
    if path.parent.is_dir():
        around += [str(near) for near in path.parent.iterdir()]
    close = difflib.get_close_matches(str(path), around, n=1)
    return f": did you mean {close[0]}?" if close else ": check the name"


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}; leave it out, or see who may read it"
        ) from None
