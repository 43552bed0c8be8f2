"""One process at a time, also on a disk of other machines, where locks may not work."""

import errno
import fcntl
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from speedrun import locks
from speedrun.locks import InUseError, held

HOLD = """
import sys, time
from pathlib import Path
from speedrun import locks
locks.BEAT = 0.05
locks.platform.node = lambda: sys.argv[2]
if sys.argv[3] == "without":
    def flock(*_): raise OSError(37, "No locks available")
    locks.fcntl.flock = flock
with locks.held(Path(sys.argv[1]), wait=False):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "BEAT", 0.05)
    monkeypatch.setattr(locks, "PATIENCE", 1.0)
    monkeypatch.setattr(locks, "SETTLE", 0.01)
    monkeypatch.setattr(platform, "node", lambda: "here")


def no_locks(_: object, __: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.fixture(params=["with", "without"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "without":
        monkeypatch.setattr(fcntl, "flock", no_locks)
    return str(request.param)


@pytest.fixture
def holder(tmp_path: Path, kind: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock and says that it is `there`."""
    words = [sys.executable, "-c", HOLD, str(tmp_path / "lock"), "there", kind]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_file_is_gone_when_it_is_let_go(tmp_path: Path, kind: str) -> None:
    for _ in range(2):
        with held(tmp_path / "lock", wait=False):
            assert [path.name for path in tmp_path.iterdir()] == ["lock"]
        assert not list(tmp_path.iterdir())
    with pytest.raises(KeyError), held(tmp_path / "lock", wait=False):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_another_host_is_named_and_may_leave_it_behind(
    tmp_path: Path, kind: str, holder: subprocess.Popen[str]
) -> None:
    with pytest.raises(InUseError, match=f"process {holder.pid} on there"):
        held(tmp_path / "lock", wait=False).__enter__()
    holder.kill()
    holder.wait()
    assert (tmp_path / "lock").exists()  # left behind: no sign of life comes from it
    with held(tmp_path / "lock", wait=False):
        assert (tmp_path / "lock").read_text().split()[:2] == ["here", str(os.getpid())]


def test_a_lock_of_the_other_host_alone_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk where every machine keeps its own locks: ours is to be had."""
    (tmp_path / "lock").write_text("there 7 0\n")
    done = threading.Event()

    def beat() -> None:
        number = 0
        while not done.wait(0.05):
            number += 1
            (tmp_path / "lock").write_text(f"there 7 {number}\n")

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(InUseError, match="process 7 on there"):
            held(tmp_path / "lock", wait=False).__enter__()
    finally:
        done.set()
        thread.join()


def test_whoever_died_here_left_nothing_to_wait_for(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watch(*_: object) -> bool:
        raise AssertionError("a process of this host is known to be dead: nobody watches it")

    monkeypatch.setattr(locks, "_moves", watch)
    died = subprocess.Popen([sys.executable, "-c", ""])
    died.wait()
    (tmp_path / "lock").write_text(f"here {died.pid} 3\n")
    with held(tmp_path / "lock", wait=False):
        assert (tmp_path / "lock").read_text().split()[:2] == ["here", str(os.getpid())]


@pytest.mark.parametrize("text", ["", "garbage", "a b c\n", "\x00\xff", "there 1\n"])
def test_a_file_that_names_nobody_is_free(tmp_path: Path, kind: str, text: str) -> None:
    (tmp_path / "lock").write_text(text)
    with held(tmp_path / "lock", wait=False):
        pass


def test_threads_take_turns(tmp_path: Path) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(5):
            with held(tmp_path / "lock", wait=True):
                inside += 1
                most = max(most, inside)
                time.sleep(0.002)
                inside -= 1

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert most == 1


def test_where_nothing_can_be_made_the_reason_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), held(tmp_path / "none/lock", wait=False):
        pass


def test_two_hosts_whose_locks_do_not_meet_are_never_both_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen a file without a name before either writes its own."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(platform, "node", lambda: threading.current_thread().name)
    monkeypatch.setattr(locks, "SETTLE", 0.1)
    about_to_write, decided = threading.Barrier(2), threading.Barrier(2)
    sign, seen, refused = locks._sign, set[str](), []

    def sign_together(handle: int, owner: locks.Owner) -> None:
        if owner.host not in seen:
            seen.add(owner.host)
            with suppress(threading.BrokenBarrierError):
                about_to_write.wait(1.0)
        sign(handle, owner)

    monkeypatch.setattr(locks, "_sign", sign_together)

    def start() -> None:
        try:
            with held(tmp_path / "lock", wait=False):
                decided.wait(20.0)
        except InUseError as owner:
            refused.append(str(owner))
            decided.wait(20.0)

    hosts = [threading.Thread(target=start, name=name) for name in ("one", "two")]
    for host in hosts:
        host.start()
    for host in hosts:
        host.join()
    assert len(refused) == 1
    assert not list(tmp_path.iterdir())


def test_the_second_host_is_refused_and_the_first_start_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(locks, "SETTLE", 5.0)  # were it waited for, the test would be known by it
    slept: list[float] = []
    sleep = time.sleep

    def counted(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            slept.append(seconds)
        sleep(min(seconds, 0.05))

    monkeypatch.setattr(time, "sleep", counted)
    with held(tmp_path / "lock", wait=False):
        assert not any(slept)
        monkeypatch.setattr(platform, "node", lambda: "there")
        with pytest.raises(InUseError, match=f"process {os.getpid()} on here"):
            held(tmp_path / "lock", wait=False).__enter__()


def test_a_name_goes_to_the_disk_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed, sync = threading.Semaphore(0), os.fsync

    def counted(handle: int) -> None:
        sync(handle)
        flushed.release()

    monkeypatch.setattr(os, "fsync", counted)
    with held(tmp_path / "lock", wait=False):
        for _ in range(3):
            assert flushed.acquire(timeout=20)


def test_a_file_that_cannot_be_read_is_not_taken_for_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lock").write_text("there 7 0\n")

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(OSError, match="Input/output"):
        held(tmp_path / "lock", wait=False).__enter__()
    assert not locks.is_held(tmp_path / "lock")
