"""Disks that run full or cannot be written: with a disk of their own, or without one."""

import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes: writing more fails with an OSError, as on a full disk.

    Python ignores the signal that comes with it. Output that pytest captures goes into files too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A disk of so many bytes (4m) at `folder`, where we may mount one."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "speedrun-test", str(folder)]
    if shutil.which("mount") is None or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("NOT TESTED: full and read-only disks, since mounting a tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-R", "-l", str(folder)], check=True)


def protect(disk: Path) -> None:
    """From here on it can only be read."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


def fill(disk: Path) -> None:
    """To the last byte, by a file that can be removed again."""
    with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with suppress(OSError), (disk / "ballast").open("ab", buffering=0) as file:
        while True:
            file.write(b"x")
