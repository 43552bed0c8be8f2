"""How many runs share the machine: as asked, as it was begun, as cores and memory allow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from speedrun import limits
from speedrun.errors import ConfigError
from speedrun.limits import MemoryLimit
from speedrun.science import share
from speedrun.science.jobs import Job, RunSet, plan_jobs
from speedrun.science.share import ONE_A_CORE, share_machine
from tests.conftest import TINY

SMALL = tuple(word for word in TINY if not word.startswith("machine."))


def set_free(monkeypatch: pytest.MonkeyPatch, free: int, *, each: bool = False) -> None:
    """Of 64 GiB that runs share, or that each of them may have."""
    limit = MemoryLimit(64 << 30, free, "of a test", each)
    monkeypatch.setattr(share, "memory_shares", lambda runs: [limit.share(runs)])


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (share, limits):
        monkeypatch.setattr(module, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    set_free(monkeypatch, 64 << 30)
    monkeypatch.setattr(share, "memory_bytes", lambda: 64 << 30)


def plan(*words: str, seeds: int = 10) -> list[Job]:
    return plan_jobs({"label": ("modern", (*SMALL, *words))}, "nano", range(seeds))


def shared(
    root: Path,
    jobs: list[Job],
    asked: int | None = None,
    otherwise: int = ONE_A_CORE,
    said: list[str] | None = None,
) -> set[tuple[int, int]]:
    """Runs at a time and threads of each that the jobs were given."""
    say = ([] if said is None else said).append
    share = share_machine(RunSet(root, "data"), jobs, asked, otherwise, say)
    found = [share.of(job) for job in jobs]
    assert [(job.label, job.seed) for job in found] == [(job.label, job.seed) for job in jobs]
    return {(job.config.machine.jobs, job.config.machine.threads) for job in found}


def test_one_run_a_core_and_no_core_idle(tmp_path: Path) -> None:
    assert shared(tmp_path, plan()) == {(8, 1)}
    assert shared(tmp_path, plan(seeds=3)) == {(3, 2)}
    assert shared(tmp_path, plan(seeds=1)) == {(1, 0)}
    assert shared(tmp_path, plan("machine.threads=3")) == {(2, 3)}
    assert shared(tmp_path, plan("machine.threads=8")) == {(1, 8)}


def test_threads_are_no_more_than_the_shell_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    said: list[str] = []
    assert shared(tmp_path, plan(), asked=4, said=said) == {(4, 1)}
    assert said[1:] == ["OMP_NUM_THREADS=1: 4 of 8 cores work; unset it or set machine.threads"]
    said.clear()
    assert shared(tmp_path, plan("machine.threads=2"), asked=4, said=said) == {(4, 2)}
    assert shared(tmp_path, plan(), asked=8, said=said) == {(8, 1)}
    assert not [line for line in said if "OMP" in line]


def test_as_many_as_asked(tmp_path: Path) -> None:
    said: list[str] = []
    assert shared(tmp_path, plan(), asked=1, said=said) == {(1, 0)}
    assert said == []
    assert shared(tmp_path, plan(), asked=4, otherwise=1, said=said) == {(4, 2)}
    (line,) = said
    assert line.startswith("runs are made 4 at a time on 2 threads each; seconds")
    assert shared(tmp_path, plan(), asked=ONE_A_CORE, otherwise=1) == {(8, 1)}
    assert shared(tmp_path, plan(), otherwise=1) == {(1, 0)}
    assert shared(tmp_path, plan(), asked=20) == {(20, 1)}


def test_no_more_than_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, 2 << 30)  # a run takes 0.4 GiB at least
    ((jobs, threads),) = shared(tmp_path, plan())
    assert 1 < jobs < 8
    assert threads == 8 // jobs
    with pytest.raises(ConfigError, match=f"--jobs 8 cannot be used: .* free holds {jobs}"):
        shared(tmp_path, plan(), asked=8)
    set_free(monkeypatch, 1 << 20)
    assert shared(tmp_path, plan()) == {(1, 0)}
    set_free(monkeypatch, 2 << 30, each=True)
    assert shared(tmp_path, plan()) == {(8, 1)}


def test_a_gpu_takes_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "choose_device", lambda _: torch.device("cuda"))
    assert shared(tmp_path, plan()) == {(1, 0)}
    assert shared(tmp_path, plan(), asked=1) == {(1, 0)}
    with pytest.raises(ConfigError, match="--jobs 2 cannot be used: a GPU"):
        shared(tmp_path, plan(), asked=2)


@pytest.mark.parametrize("begun", [1, 3])
def test_what_was_begun_goes_on_the_same_way(tmp_path: Path, begun: int) -> None:
    runs, (first, second, *_) = RunSet(tmp_path, "data"), plan()
    way = {1: (1, 0), 3: (3, 2)}[begun]
    share = share_machine(runs, [first, second], begun, 1, print)
    for job in map(share.of, (first, second)):
        runs.folder(job).create(job.config)
    (tmp_path / "runs/notes").mkdir()  # not a run
    for otherwise in (1, ONE_A_CORE):
        assert shared(tmp_path, plan(), otherwise=otherwise) == {way}
    assert shared(tmp_path, plan("model.softcap=15.0")) == {(8, 1)}  # another race
    assert shared(tmp_path, plan("machine.threads=1")) == {(8, 1)}  # other threads are asked for
    said: list[str] = []
    assert shared(tmp_path, plan(), asked=2, said=said) == {(2, 4)}
    how = {1: "one at a time", 3: "3 at a time on 2 threads"}[begun]
    assert said[0] == (
        f"2 of these runs are here, made {how}; now they are made 2 at a time on 4 threads"
    )
