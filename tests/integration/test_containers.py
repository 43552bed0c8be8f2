"""Verbs in a mount namespace of their own, where something is missing, full or only to be read."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conftest import TINY

ROOT = Path(__file__).parents[2]
QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")


def alone(*words: str) -> bool:
    command = ["unshare", "-m", *words]
    return (
        bool(shutil.which("unshare"))
        and not subprocess.run(command, capture_output=True).returncode
    )


needs_mounts = pytest.mark.skipif(
    not alone("true"), reason="NOT TESTED: verbs without /proc and so on, since mounting needs root"
)


def within(
    setting: str, words: str, folder: Path, *, variables: str | None = None, user: str = ""
) -> subprocess.CompletedProcess[str]:
    """`speedrun words` in `folder`, after the shell commands of `setting` in a namespace."""
    if variables is None:
        variables = f"HOME={folder.parent / 'home'}"
    usual = f"PATH=/usr/bin:/bin PYTHONPATH={ROOT} SPEEDRUN_NATIVE=0"
    verb = f"exec {user} env -i {usual} {variables}"
    script = f"set -e; {setting}; cd {folder}; {verb} {sys.executable} -m speedrun {words}"
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    (tmp_path / "texts").mkdir()
    for number in range(40):
        lines = [f"{number} + {n} = {number + n}\n" for n in range(120)]
        (tmp_path / f"texts/{number}.txt").write_text("".join(lines))
    return tmp_path / "work"


def train(folder: Path) -> str:
    sources = shlex.quote(f'data.sources=["{folder.parent}/texts"]')
    return (
        f"train modern --steps 2 --sample-tokens 0 {' '.join(TINY)} {sources} data.tokenizer=byte"
    )


def only_read(place: Path) -> str:
    return f"mount --bind {place} {place}; mount -o remount,bind,ro {place}"


def python_for_all(scratch: Path) -> str:
    """A setting in which any user can run this Python, though it be below root's own folder."""
    python = Path(sys.base_prefix).resolve()
    closed = [each for each in reversed(python.parents) if not each.stat().st_mode & 0o001]
    if not closed:
        return "true"
    if ROOT.is_relative_to(closed[0]):
        pytest.skip("NOT TESTED: a user without a name, for whom this Python is out of reach")
    aside = scratch / "python"
    aside.mkdir()
    return (
        f"mount --bind {python} {aside}; mount -t tmpfs -o mode=755 none {closed[0]}; "
        f"mkdir -p {python}; mount --bind {aside} {python}"
    )


def one_sentence(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stderr.splitlines() if "cpuinfo" not in line]
    assert len(lines) == 1, done.stderr
    for part in parts:
        assert part in lines[0]


@needs_mounts
def test_without_proc(folder: Path) -> None:
    gone = "mount -t tmpfs none /proc"
    done = within(gone, "doctor", folder)
    assert done.returncode == 0, done.stderr
    assert "not mounted" in done.stdout
    done = within(gone, train(folder), folder)
    assert done.returncode == 0, done.stderr


@needs_mounts
def test_a_home_that_is_only_read(folder: Path) -> None:
    home = folder.parent / "home"
    home.mkdir()
    done = within(only_read(home), "doctor", folder)
    assert done.returncode == 0, done.stderr
    assert "cannot be written: Read-only" in done.stdout
    one_sentence(within(only_read(home), train(folder), folder), "set SPEEDRUN_HOME")
    elsewhere = f"SPEEDRUN_HOME={folder.parent}/elsewhere"
    done = within(only_read(home), train(folder), folder, variables=elsewhere)
    assert done.returncode == 0, done.stderr
    # Once the dataset is there, reading is enough.
    place = only_read(folder.parent / "elsewhere")
    done = within(place, train(folder), folder, variables=elsewhere)
    assert done.returncode == 0, done.stderr


@needs_mounts
def test_a_folder_that_is_only_read_and_one_that_is_full(folder: Path) -> None:
    one_sentence(within(only_read(folder), train(folder), folder), "Read-only", "--run DIR")
    tiny = f"mount -t tmpfs -o size=64k none {folder}"
    one_sentence(within(tiny, train(folder), folder), "No space left", "--resume")
    full = f"{tiny}; head -c 1m /dev/zero > {folder}/ballast 2> /dev/null || true"
    one_sentence(within(full, train(folder), folder), "No space left")


@needs_mounts
def test_a_user_whom_nobody_knows(folder: Path) -> None:
    user = "setpriv --reuid=12345 --regid=12345 --clear-groups"
    with tempfile.TemporaryDirectory() as name:  # the folders of pytest are its user's alone
        place = Path(name) / "work"
        shutil.copytree(folder.parent / "texts", place.parent / "texts")
        place.mkdir()
        place.parent.chmod(0o755)
        place.chmod(0o777)
        reach = python_for_all(place.parent)
        done = within(reach, train(place), place, variables="", user=user)
        one_sentence(done, "set SPEEDRUN_HOME")
        home = f"SPEEDRUN_HOME={place}/home"
        done = within(reach, train(place), place, variables=home, user=user)
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(
    not QUOTA.parent.is_dir() or not alone("test", "-w", str(QUOTA.parent)),
    reason="NOT TESTED: a real CPU quota, since no control groups of version 1 can be made here",
)
def test_a_real_quota_is_named(folder: Path) -> None:
    group = QUOTA.parent / "speedrun-test"
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text("50000")
        join = f"echo $$ > {group}/cgroup.procs"
        done = within(join, "doctor", folder)
        assert done.returncode == 0, done.stderr
        assert "1 of" in done.stdout
        assert "CPU quota of the container (cgroup cpu.cfs_quota_us), 0.5 cores" in done.stdout
    finally:
        group.rmdir()
