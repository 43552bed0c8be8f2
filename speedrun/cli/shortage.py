"""Memory or disk that runs out in the middle of a verb, as a sentence that says what to do.

What is known beforehand is refused beforehand; this is for the rest, wherever it happens. And
whether a file that failed is the user's: a fault with any other is one of ours.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from speedrun.errors import SpeedrunError
from speedrun.files import NoHomeError, cache_home
from speedrun.limits import memory_shares

# torch's own words; of C++ libraries that end in std::bad_alloc Python makes a MemoryError.
OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory", "bad_alloc")
NO_TEMPORARY = "temporary directory"
NO_THREAD = "can't start new thread"
SMALLER = {
    "train": "make model.width, model.layers, batch.length or machine.microbatch smaller",
    "data": "use a smaller --max-document-bytes, or fewer cores (taskset -c 0 speedrun ...)",
    "sample": "write fewer --samples at a time or fewer --tokens",
    "eval": "use a smaller --context",
    "serve": "use fewer --slots or a smaller --context",
    "race": "use --jobs 1",
    "ablate": "use --jobs 1",
    "tune": "use --jobs 1",
}
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
OURS = ("runs", "races", "data", "report.html")  # written in the current folder unless told
TOO_MANY = {errno.EMFILE, errno.ENFILE}


def shortage(error: BaseException, words: Sequence[str]) -> SpeedrunError | None:
    """The sentence for it, `words` being those of the command line; None for any other error."""
    verb = next((word for word in words if not word.startswith("-")), "")
    if isinstance(error, RuntimeError) and NO_THREAD in str(error):
        return SpeedrunError(
            "no further thread can be started here: raise ulimit -u or ulimit -v, or set "
            "machine.threads=1"
        )
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)
    ):
        return _memory(verb)
    if isinstance(error, OSError):
        return _disk(error, verb)
    return None


def _memory(verb: str) -> SpeedrunError:
    instead = SMALLER.get(verb, "make it smaller")
    on = "; --resume goes on from the last checkpoint, if there is one" if verb == "train" else ""
    return SpeedrunError(
        f"memory ran out, of {memory_shares()[0]}: {instead}, or give it more memory{on}"
    )


def _disk(error: OSError, verb: str) -> SpeedrunError | None:
    where = f" {error.filename}" if error.filename is not None else ""
    if error.errno == errno.ENOMEM:
        return _memory(verb)
    if error.errno == errno.ENOENT and NO_TEMPORARY in str(error.strerror):
        return SpeedrunError(
            "there is no folder for temporary files: set TMPDIR to one that can be written"
        )
    if error.errno == errno.ENOENT and error.filename is None and _nowhere():
        return SpeedrunError("the current folder was removed: change to another one")
    if error.errno in FULL:
        return SpeedrunError(
            f"cannot write{where}: {error.strerror}; free some space or choose another folder"
        )
    if error.errno == errno.EROFS:
        return SpeedrunError(f"cannot write{where}: {error.strerror}; choose another folder")
    if error.errno in TOO_MANY:
        return SpeedrunError(f"too many files are open at a time{where}: raise ulimit -n")
    return None


def of_user(name: object, words: Sequence[str]) -> bool:
    """Is the file one that the command line names, or where verbs keep theirs?

    What is in a folder that was named counts, and so do the folders around what was named.
    """
    if not isinstance(name, str | bytes):
        return False
    if _nowhere():
        return True
    path = _absolute(os.fsdecode(name))
    named = [part for word in words for part in (word, word.partition("=")[2].strip("'\"")) if part]
    places = [_absolute(text) for text in named]
    if any(path in place.parents for place in places):
        return True
    places += map(_absolute, OURS)
    with suppress(NoHomeError):
        places.append(cache_home().absolute())
    with suppress(FileNotFoundError):  # none of the usual ones can be written
        places.append(Path(tempfile.gettempdir()).absolute())
    return any(path.is_relative_to(place) for place in places)


def _absolute(text: str) -> Path:
    path = Path(text)
    with suppress(RuntimeError):  # ~ of somebody whom the system does not know
        path = path.expanduser()
    return Path(os.path.normpath(path.absolute()))


def _nowhere() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False
