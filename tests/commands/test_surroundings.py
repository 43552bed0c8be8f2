"""What `speedrun doctor` says of limits and folders, and what to set where they are in the way."""

import fcntl
import os
import resource
import tempfile
from pathlib import Path

import pytest

from speedrun.commands import surroundings
from speedrun.commands.surroundings import Fact, folders_here, limits_here
from tests.room import fill, protect, small_disk


def facts(gpu: bool = False) -> dict[str, Fact]:
    return {fact.name: fact for fact in [*limits_here(), *folders_here(gpu)]}


@pytest.fixture(autouse=True)
def _usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_NODE", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)


def test_limits_are_named_with_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "2")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "256")
    found = facts()
    assert "2 of 64 cores: SLURM_CPUS_PER_TASK=2" in found["cpu"].found
    assert found["cpu"].values["cores"] == 2
    assert "256 MiB: SLURM_MEM_PER_NODE, the machine has" in found["memory"].found
    assert found["threads"].found.startswith("2, one a core")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert facts()["threads"].found == "1: OMP_NUM_THREADS=1"
    assert "unset OMP_NUM_THREADS" in facts()["threads"].advice


def test_a_fraction_of_a_core_is_a_reason_to_be_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    monkeypatch.setattr("speedrun.limits.PROCESS", tmp_path)
    monkeypatch.setattr("speedrun.limits.CGROUPS", tmp_path)
    cpu = facts()["cpu"]
    source = "CPU quota of the container (cgroup cpu.max), 0.5 cores"
    assert f"1 of 64 cores: {source}" in cpu.found
    assert "less than one core" in cpu.advice


def test_folders_are_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path / "none/yet"))
    assert facts()["cache folder"].values["writable"]
    assert not list(tmp_path.iterdir())  # nothing is made by asking
    with small_disk(tmp_path / "disk", "256k") as disk:
        monkeypatch.setenv("SPEEDRUN_HOME", str(disk))
        assert "little room" in facts()["cache folder"].advice
        fill(disk)
        cache = facts()["cache folder"]
        assert not cache.values["writable"]
        assert "set SPEEDRUN_HOME" in cache.advice
        (disk / "ballast").unlink()
        protect(disk)
        monkeypatch.chdir(disk)
        found = facts()
        assert "cannot be written: Read-only" in found["cache folder"].found
        assert "cannot be written: Read-only" in found["this folder"].found
        assert "--run DIR" in found["this folder"].advice
        monkeypatch.chdir(tmp_path)


def test_temporary_files_elsewhere_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", "/nonexistent")
    assert "TMPDIR=/nonexistent cannot be used" in facts()["temporary files"].advice
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/dev/null"])
    assert facts()["temporary files"].found.startswith("none: No usable temporary directory")


def test_a_folder_that_was_removed_under_us(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert facts()["this folder"].values["writable"] is False
    monkeypatch.chdir(tmp_path)


def test_locks_and_proc_that_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def flock(*_: object) -> None:
        raise OSError(37, "No locks available")

    assert facts()["/proc"].found == "there"
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(surroundings, "PROCESS", tmp_path)
    assert "no file locks" in facts()["cache folder"].found
    assert "mount it" in facts()["/proc"].advice


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    assert "ulimit -n" in surroundings._open_files().advice
