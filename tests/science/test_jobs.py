"""Which runs of a race are found again: the same experiment, machine settings, data and code."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from speedrun.errors import RunError
from speedrun.science import children, jobs
from speedrun.science.jobs import Job, RunSet, plan_jobs
from speedrun.train.environment import code_hash
from speedrun.train.run import RunFolder
from tests.report.made import made_summary


class MadeChild:
    """A run that ends when it has been looked at so often; `end` writes what it leaves behind."""

    def __init__(self, looks: int, end: Callable[[], int]) -> None:
        self._looks, self._end = looks, end
        self._code: int | None = None

    def poll(self) -> int | None:
        self._looks -= 1
        if self._looks <= 0 and self._code is None:
            self._code = self._end()
        return self._code

    def terminate(self) -> None:
        self._code = -signal.SIGTERM

    def last_words(self) -> str:
        return "no memory left"


def job(*words: str, recipe: str = "modern") -> Job:
    (found,) = plan_jobs({"label": (recipe, words)}, "nano", [0])
    return found


def test_a_folder_is_known_by_experiment_machine_data_and_code(
    tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = f"data.dir={tiny_dataset}"
    plain = RunSet(tmp_path, "data").folder(job(here)).path

    def same(*words: str, data: str = "data", recipe: str = "modern") -> bool:
        return RunSet(tmp_path, data).folder(job(here, *words, recipe=recipe)).path == plain

    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "modern"\n')
    shutil.copytree(tiny_dataset, tmp_path / "moved")
    assert same(f"data.dir={tmp_path}/moved")  # the fingerprint says that it holds the same
    assert same(recipe=str(mine))  # another name for the same values
    assert not same("model.softcap=15.0")
    assert not same("machine.threads=1")  # seconds are compared too
    assert not same("train.seed=0", "machine.microbatch=1")
    assert not same(data="other")
    monkeypatch.setattr(jobs, "code_hash", lambda: "another")
    assert not same()


def test_only_runs_that_came_to_their_end_are_finished(tmp_path: Path) -> None:
    runs = RunSet(tmp_path, "data")
    assert runs.finished(job()) is None
    folder = runs.folder(job())
    folder.path.mkdir(parents=True)
    folder.write_summary(made_summary(stopped_early=True))
    assert runs.finished(job()) is None
    folder.write_summary(made_summary(val_loss=2.5))
    found = runs.finished(job())
    assert found is not None
    assert found.val_loss == 2.5


@pytest.mark.parametrize("edit", ["", "model.softcap=15.0", "machine.threads=1"])
def test_a_run_that_was_cut_off_goes_on_where_the_data_now_lies(
    edit: str, tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_dataset, tmp_path / "now here")
    runs, moved = RunSet(tmp_path, "data"), job(f"data.dir={tmp_path}/now here")
    folder = runs.folder(moved)
    words = [f"data.dir={tiny_dataset}", *filter(None, [edit])]
    folder.create(job(*words).config, {"code_sha256": code_hash()})
    asked: list[str] = []

    def end() -> int:
        folder.write_summary(made_summary(steps_to_target=2.5, reached_target=True))
        return 0

    def child(words: Sequence[str]) -> MadeChild:
        asked.extend(words)
        return MadeChild(1, end)

    monkeypatch.setattr(children, "Child", child)
    if edit:  # what was run is not what the folder's name stands for
        with pytest.raises(RunError, match=f"{edit.partition('=')[0]} changed while the runs"):
            runs.run_all([moved], asked.append)
        assert not folder.path.exists()
        return
    (entry,) = runs.run_all([moved], asked.append)
    assert asked[1:4] == ["train", f'data.dir="{tmp_path}/now here"', "--resume"]
    assert (entry.recipe, entry.steps_to_target) == ("label", 2.5)
    assert (tmp_path / str(entry.run)) == folder.path


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """By seed: how often a run is looked at before it ends, and its exit code. Others never end."""
    plan: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(children, "PAUSE", 0.0)

    def child(words: Sequence[str]) -> MadeChild:
        options = dict(pairwise(words))
        folder, seed = RunFolder(Path(options["--run"])), int(options["--seed"])
        looks, code = plan.get(seed, (1 << 60, 0))

        def end() -> int:
            (config,) = [one.config for one in plan_of(4) if one.seed == seed]
            folder.create(config, {"code_sha256": code_hash()})
            if code == 0:
                times = {"seconds_to_target": 2.0, "wall_seconds_to_target": 3.0}
                folder.write_summary(made_summary(seed=seed, steps_to_target=float(seed), **times))
            return code

        return MadeChild(looks, end)

    monkeypatch.setattr(children, "Child", child)
    return plan


def plan_of(seeds: int, at_once: int = 2) -> list[Job]:
    return plan_jobs({"label": ("modern", [f"machine.jobs={at_once}"])}, "nano", range(seeds))


def test_runs_at_a_time_are_refilled_and_told_in_order(
    tmp_path: Path, made: dict[int, tuple[int, int]]
) -> None:
    made |= {0: (9, 0), 1: (2, 0), 2: (2, 0), 3: (20, 0)}
    said: list[str] = []
    entries = RunSet(tmp_path, "data").run_all(plan_of(4), said.append)
    assert [entry.seed for entry in entries] == [0, 1, 2, 3]
    assert [entry.steps_to_target for entry in entries] == [0, 1, 2, 3]
    assert {(entry.seconds_to_target, entry.wall_seconds_to_target) for entry in entries} == {
        (None, None)
    }  # of a shared machine
    under_way = most = 0
    for line in said:
        under_way += 1 if line.endswith("running") else -1
        most = max(most, under_way)
    assert (under_way, most) == (0, 2)
    results = [line for line in said if not line.endswith("running")]
    assert [int(line[1]) for line in results] == [2, 3, 1, 4]
    assert all(line.endswith("s of training beside others") for line in results)


def test_a_run_that_fails_is_told_in_its_own_words_and_takes_no_other_down(
    tmp_path: Path, made: dict[int, tuple[int, int]]
) -> None:
    made |= {0: (2, 3), 1: (9, 0)}
    runs, plan, said = RunSet(tmp_path, "data"), plan_of(4), list[str]()
    with pytest.raises(RunError, match=r"of label with seed 0 failed .* code 3: no memory left"):
        runs.run_all(plan, said.append)
    assert "[1/4] label, seed 0: failed; of the others 1 under way" in said
    assert [runs.finished(one) is not None for one in plan] == [False, True, False, False]
    assert sum(line.endswith("running") for line in said) == 2  # none was begun after the failure


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_runs_and_begins_none(
    tmp_path: Path, made: dict[int, tuple[int, int]], number: signal.Signals
) -> None:
    made |= {0: (2, 0)}
    said: list[str] = []
    before = signal.getsignal(number)

    def say(text: str) -> None:
        said.append(text)
        if text == "[3/4] label, seed 2: running":  # beside seed 1
            os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as stop:
        RunSet(tmp_path, "data").run_all(plan_of(4), say)
    assert stop.value.code == 128 + number
    assert said[-1] == "stopped; the same command goes on from the checkpoints"
    assert not any("failed" in line or "seed 3" in line for line in said)
    assert signal.getsignal(number) == before


def test_a_folder_that_cannot_be_made_is_told_before_any_run(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(RunError, match=r"taken cannot be written: .*; name another with --out DIR"):
        RunSet(tmp_path / "taken", "data").run_all(plan_of(1), print)
