"""Which dataset a corpus was found to be, so that a run need not read the corpus to start.

The name of a dataset follows from what every file of its corpus holds, and to hash the standard
library's 1,800 files takes a fifth of a second. What was found is kept under $SPEEDRUN_HOME by a
stamp of the files' names, sizes and times; a file that was added, removed, replaced or written to
makes another stamp, and the corpus is read again.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from speedrun.data.corpus import STDLIB
from speedrun.data.docstrings import DOCSTRINGS, libraries
from speedrun.errors import SpeedrunError
from speedrun.files import cache_home, write_atomically

NOT_STDLIB = ("__pycache__", "site-packages", "dist-packages")  # below the standard library


def stamp_of(sources: Sequence[str], options: str) -> str | None:
    """Of all files below the sources; None where a source is no file or folder of this machine."""
    digest = hashlib.sha256(f"{options} {list(sources)!r}".encode())
    for source in sources:
        left_out = NOT_STDLIB if source in (STDLIB, DOCSTRINGS) else ()
        for path in _homes(source):
            if not path.exists():  # a glob, or a name on the hub
                return None
            for line in sorted(_lines(str(path.resolve()), left_out)):
                digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()


def _homes(source: str) -> list[Path]:
    if source == STDLIB:
        return [Path(sysconfig.get_paths()["stdlib"])]
    if source == DOCSTRINGS:
        return [home for _, home in libraries()]
    return [Path(source).expanduser()]


def _lines(path: str, left_out: Sequence[str]) -> Iterator[str]:
    """A line for each file at or below `path`; folders that links lead to are not entered."""
    try:
        entries = os.scandir(path)
    except NotADirectoryError:
        yield _line(path, os.stat(path))  # noqa: PTH116 (strings: 1,800 Paths would take longer)
        return
    with entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in left_out:
                    yield from _lines(entry.path, left_out)
            else:
                with suppress(FileNotFoundError):  # a link to nowhere
                    yield _line(entry.path, entry.stat())


def _line(path: str, stat: os.stat_result) -> str:
    """The time of change too: tools that copy files set the time of writing back."""
    return f"{path} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}\n"


def _place(stamp: str) -> Path:
    return cache_home() / "known" / stamp


def recall(stamp: str) -> Path | None:
    """The folder that was found under this stamp, whether or not it is still there."""
    with suppress(OSError):
        return cache_home() / "datasets" / _place(stamp).read_text(encoding="utf-8")
    return None


def remember(stamp: str, folder: Path) -> None:
    """Keep it for the next start; where nothing can be written, the next one reads again."""
    with suppress(OSError, SpeedrunError):
        _place(stamp).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_place(stamp), folder.name.encode())
