"""A file that one process at a time holds, also where machines share a disk.

`flock` decides where it works. On a disk of other machines (NFS) it may be missing, or be known to
one machine alone, so whoever holds the file also writes its host and process into it, with a number
that rises every few seconds. Who finds the name of another host there watches the number: one that
moves is in use, one that stands still was left behind by a process that was killed. Clocks of
different machines are never compared.

Whoever makes the file is the first: that is decided once for all machines. It writes its name at
once, and whoever finds the file without a name gives it time for that. One that was late, or took
the place of another host, waits for the other's next sign of life, which writes over its own name.
"""

from __future__ import annotations

import fcntl
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

BEAT = 3.0  # seconds between two signs of life
PATIENCE = 4 * BEAT  # without one, the owner is gone
SETTLE = 0.5  # seconds in which a name is written and shows
PAUSES = (0.0, 0.02, 0.1)  # seconds: `is_held` of another process has the lock for an instant
RECENT = 60.0  # seconds
LENGTH = 300  # of an owner's line


class Owner(NamedTuple):
    host: str
    process: int
    beat: int

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


class InUseError(Exception):
    """Somebody else holds the file; the text says who, as far as it is known."""


@contextmanager
def held(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold `path`, which is made for that and removed at the end; an OSError if it cannot be made.

    Without `wait`, one that is in use is an InUseError.
    """
    while True:
        since = time.monotonic()
        handle, made = _open(path)
        try:
            locks = _flock(path, handle, wait)
            if not _names(path, handle):  # removed by its owner while we waited
                continue
            if not made:
                since = time.monotonic()
            me, before = Owner(_host(), os.getpid(), 0), _owner(path)
            if not _free(path, before, me, locks, wait):
                continue
            if before is None and not made:  # whoever made it may be about to write its name
                time.sleep(2 * SETTLE)
                since = time.monotonic()
                if _owner(path) is not None:
                    continue
            _sign(handle, me)
            if time.monotonic() - since > SETTLE or (before and before.host != me.host):
                time.sleep(2 * BEAT + SETTLE)
            elif not made and not (locks and before):
                time.sleep(SETTLE)
            if (now := _owner(path)) is not None and now[:2] != me[:2]:  # another was last
                if not wait:
                    raise InUseError(str(now))
                continue
            if not _names(path, handle):
                continue
            try:
                with _beating(handle, me):
                    yield
            finally:
                with suppress(OSError):  # a disk that has become read-only
                    if _names(path, handle):
                        path.unlink()
            return
        finally:
            os.close(handle)


def is_held(path: Path) -> bool:
    """Whether somebody holds the file, for those who only ask and do not wait.

    Of another host it is known by the time of its last sign of life: clocks that are minutes apart
    hide it here, and nowhere else.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    locks = True
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        locks = False
    finally:
        os.close(handle)
    try:
        owner = _owner(path)
    except OSError:  # nobody can tell
        return False
    if owner is None:
        return False
    if owner.host != _host():
        with suppress(OSError):
            return abs(time.time() - path.stat().st_mtime) < RECENT
    return not locks and _alive(owner.process)


def _host() -> str:
    return "-".join(platform.node().split()) or "a-host"


def _open(path: Path) -> tuple[int, bool]:
    """The file, and whether it is known to have been made here and now."""
    with suppress(FileExistsError):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), True
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644), False  # it may be gone since


def _flock(path: Path, handle: int, wait: bool) -> bool:
    """Lock the file; whether there are locks here at all."""
    for pause in (0.0,) if wait else PAUSES:
        time.sleep(pause)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            continue
        except OSError:
            return False
        return True
    raise InUseError(str(_owner(path) or "of which no more is known"))


def _free(path: Path, owner: Owner | None, me: Owner, locks: bool, wait: bool) -> bool:
    """Whether nobody holds the file but the one it is locked by; False: look again."""
    if owner is None or owner[:2] == me[:2]:
        return True
    if owner.host == me.host:  # a lock would have told
        if locks or not _alive(owner.process):
            return True
    elif not _moves(path, owner):
        return True
    if not wait:
        raise InUseError(str(owner))
    time.sleep(BEAT)
    return False


def _moves(path: Path, before: Owner) -> bool:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if _owner(path) != before:
            return True
        time.sleep(BEAT / 10)
    return False


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _owner(path: Path) -> Owner | None:
    """Who wrote the file last; opened anew, for then NFS asks the server.

    What cannot be read is an OSError: that it names nobody is not known.
    """
    try:
        with path.open("rb") as file:
            host, process, beat = file.read(LENGTH).decode().split()
        return Owner(host, int(process), int(beat))
    except (FileNotFoundError, ValueError):
        return None


def _sign(handle: int, owner: Owner) -> None:
    """Write the owner's line; always of one length, so that a full disk is in nobody's way.

    Other machines see what is on the server, to which the system would bring it half a minute
    later.
    """
    line = f"{owner.host} {owner.process} {owner.beat}"[: LENGTH - 1].ljust(LENGTH - 1)
    with suppress(OSError):
        os.pwrite(handle, f"{line}\n".encode(), 0)
        os.fsync(handle)


@contextmanager
def _beating(handle: int, owner: Owner) -> Iterator[None]:
    """Let the number rise for as long as this lasts."""
    done = threading.Event()

    def beat() -> None:
        number = 0
        while not done.wait(BEAT):
            number += 1
            _sign(handle, owner._replace(beat=number))

    thread = threading.Thread(target=beat, name="lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _names(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False
