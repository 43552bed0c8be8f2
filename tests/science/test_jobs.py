"""Which runs of a race are found again: the same experiment, machine settings, data and code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from speedrun.errors import RunError
from speedrun.science import jobs
from speedrun.science.jobs import Job, RunSet, plan_jobs
from speedrun.train.environment import code_hash
from tests.report.made import made_summary


def job(*words: str, recipe: str = "modern") -> Job:
    (found,) = plan_jobs({"label": (recipe, words)}, "nano", 1)
    return found


def test_a_folder_is_known_by_experiment_machine_data_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = RunSet(tmp_path, "data").folder(job()).path

    def same(*words: str, data: str = "data", recipe: str = "modern") -> bool:
        return RunSet(tmp_path, data).folder(job(*words, recipe=recipe)).path == plain

    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "modern"\n')
    assert same("data.dir=/moved")  # the fingerprint says that it holds the same
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
    edit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, moved = RunSet(tmp_path, "data"), job("data.dir=/now here")
    folder = runs.folder(moved)
    words = ["data.dir=/before", *filter(None, [edit])]
    folder.create(job(*words).config, {"code_sha256": code_hash()})
    asked: list[str] = []

    def child(words: Sequence[str]) -> CompletedProcess[str]:
        asked.extend(words)
        folder.write_summary(made_summary(tokens_to_target=16384, reached_target=True))
        return CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(jobs, "speedrun_in_child", child)
    if edit:  # what was run is not what the folder's name stands for
        with pytest.raises(RunError, match=f"{edit.partition('=')[0]} changed while the runs"):
            runs.run_all([moved], asked.append)
        assert not folder.path.exists()
        return
    (entry,) = runs.run_all([moved], asked.append)
    assert asked[1:4] == ["train", 'data.dir="/now here"', "--resume"]
    assert (entry.recipe, entry.steps_to_target) == ("label", 16384 // 8192)
    assert (tmp_path / str(entry.run)) == folder.path


def test_a_run_that_fails_is_told_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = CompletedProcess([], 3, "", "warning\nno memory left\n")
    monkeypatch.setattr(jobs, "speedrun_in_child", lambda _: failed)
    with pytest.raises(RunError, match=r"of label with seed 0 failed .* code 3: no memory left"):
        RunSet(tmp_path, "data").run_all([job()], lambda _: None)
