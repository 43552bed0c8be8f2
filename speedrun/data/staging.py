"""Folders that appear whole or not at all: one builder at a time, and one rename at the end.

The lock is `flock` on the working folder itself. It needs no file of its own, cannot be left behind
by a killed process, and follows the folder through its rename.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speedrun.errors import DataError
from speedrun.files import flush


@contextmanager
def locked_folder(folder: Path, wait: bool) -> Iterator[Path]:
    """`folder`, made if need be, for this process alone; removed at the end if it is empty."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # removed by its owner just now
            continue
        except OSError as error:
            raise DataError(f"{folder} cannot be made: {error.strerror}") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if not _names(folder, handle):  # renamed or removed by its owner while we waited
                continue
            try:
                yield folder
            finally:
                if _names(folder, handle) and is_empty(folder):
                    folder.rmdir()
            return
        except BlockingIOError:
            raise DataError(
                f"{folder} is in use by another process: wait for it, or stop it first"
            ) from None
        finally:
            os.close(handle)


def swap_in(partial: Path, out: Path) -> None:
    """Give a finished folder its name; what had the name before is removed afterwards."""
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    flush(partial)
    if out.exists() and not is_empty(out):
        out.rename(old)
    partial.replace(out)
    flush(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _names(folder: Path, handle: int) -> bool:
    return folder.exists() and os.path.samestat(os.fstat(handle), folder.stat())
