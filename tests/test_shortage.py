"""Memory, disk, threads and files that run out are sentences; what is none of these is not."""

import errno
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from speedrun.cli.shortage import of_user, shortage
from tests.room import room_for


def said(error: BaseException, *words: str) -> str:
    found = shortage(error, words)
    assert found is not None
    assert "\n" not in str(found)
    return str(found)


def test_torch_without_memory_says_what_to_make_smaller() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    text = said(caught.value, "train", "best")
    assert "memory ran out, of" in text
    assert "GiB" in text
    assert "model.width" in text
    assert "--resume" in text
    assert "--slots" in said(caught.value, "serve", "runs/a")
    assert "--max-document-bytes" in said(caught.value, "data", "build", "x")


def test_python_without_memory_too() -> None:
    with pytest.raises(MemoryError) as caught:
        bytearray(1 << 62)
    assert "--context" in said(caught.value, "eval", "runs/a")
    assert "--jobs 1" in said(caught.value, "race")


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="large") as caught, room_for(1000):
        (tmp_path / "a").write_bytes(bytes(5000))
    assert "free some space" in said(caught.value, "report")
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x/metrics.jsonl")
    assert "cannot write x/metrics.jsonl: No space left on device" in said(error, "train")
    error = OSError(errno.EROFS, os.strerror(errno.EROFS), "x")
    assert "another folder" in said(error, "train")


def test_too_many_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    handles = []

    def open_many() -> None:
        while True:
            handles.append(os.open(tmp_path, os.O_RDONLY))

    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 200), hard))
    try:
        with pytest.raises(OSError, match="open files") as caught:
            open_many()
    finally:
        for handle in handles:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "ulimit -n" in said(caught.value, "serve")


def test_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/dev/null"])
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(FileNotFoundError) as caught:
        tempfile.gettempdir()
    assert "set TMPDIR" in said(caught.value, "race")


def test_a_folder_that_was_removed_under_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch cannot even be imported there."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError) as caught:
        Path("x").absolute()
    assert "was removed: change to another" in said(caught.value, "doctor")
    monkeypatch.chdir(tmp_path)
    assert shortage(caught.value, ["doctor"]) is None


def test_our_own_mistakes_stay_what_they_are() -> None:
    for error in (RuntimeError("shapes do not fit"), FileNotFoundError(2, "none", "x"), KeyError()):
        assert shortage(error, ["train"]) is None


def test_a_verb_ends_in_the_sentence(tmp_path: Path) -> None:
    """Where the process may map no more than a little beyond what it has."""
    (tmp_path / "a.txt").write_text("text " * 100)
    code = (
        "import resource, sys\n"
        "import speedrun.commands.data\n"
        "from speedrun.cli import main\n"
        "def build(*words, **options): bytearray(1 << 40)\n"
        "speedrun.commands.data.build_command = build\n"
        "sys.argv = ['speedrun', 'data', 'build', 'a.txt', '--out', 'b']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1
    assert done.stderr.startswith("speedrun: error: memory ran out")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("/else/page.html", ["report", "r", "--out", "/else/page.html"], True),
        ("/else/page.html", ["report", "r", "--out=/else/page.html"], True),
        (b"/else/mine/manifest.json", ["train", "best", "data.dir='/else/mine'"], True),
        ("/else", ["data", "build", "x", "--out", "/else/deep/folder"], True),
        ("here/a", ["sample", "../folder/here"], True),
        ("races/race/runs", ["race"], True),
        ("cache/kernels", ["train"], True),
        ("/temporary/x", ["train"], True),
        ("/else/page.html.old", ["report", "r", "--out", "/else/page.html"], False),
        ("pyproject.toml", ["train", "best"], False),
        (__file__, ["train", "best", "~nobody-of-that-name"], False),
        (3, ["train"], False),
        (None, ["train"], False),
    ],
)
def test_whose_file_it_is(
    name: object, words: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SPEEDRUN_HOME", "cache")
    monkeypatch.setattr(tempfile, "tempdir", "/temporary")  # pytest's folder is in the usual one
    assert of_user(name, words) is expected
