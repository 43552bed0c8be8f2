"""Folders that appear whole or not at all: one builder at a time, and one rename at the end.

The lock is a file beside the folder, which is renamed while it is held.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from speedrun.errors import DataError
from speedrun.files import elsewhere, flush
from speedrun.locks import InUseError, held


@contextmanager
def locked_folder(folder: Path, wait: bool) -> Iterator[Path]:
    """`folder`, made if need be, for this process alone; removed at the end if it is empty."""
    with ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(held(folder.with_name(folder.name + ".lock"), wait=wait))
            folder.mkdir(exist_ok=True)
        except InUseError as owner:
            raise DataError(
                f"{folder} is in use by another process ({owner}): wait for it, or stop it first"
            ) from None
        except OSError as error:
            raise DataError(
                f"cannot write {folder}: {error.strerror}; {elsewhere(folder)}"
            ) from None
        try:
            yield folder
        finally:
            if is_empty(folder):
                folder.rmdir()


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
