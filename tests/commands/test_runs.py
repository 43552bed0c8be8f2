"""`speedrun runs`: every folder gets a row, whatever is in it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from speedrun.commands.runs import runs_command
from speedrun.commands.train import _trained_on
from speedrun.errors import ConfigError, RunError
from speedrun.terminal.program import command
from speedrun.train import checkpoint
from speedrun.train.run import RunFolder
from speedrun.train.state import Listed, list_runs, look
from tests.report.made import begun_run, made_config, made_run, made_summary


def listed(*folders: Path, **chosen: str) -> None:
    options = {"sort": "date", "track": "", "recipe": "", "state": ""} | chosen
    runs_command(folders, **options, as_json=False)


def save(run: RunFolder, step: int) -> Path:
    tensors = {"weight": torch.zeros(2)}
    return checkpoint.save(run.checkpoints, {"step": step}, tensors, tensors)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """One of each kind, the newest last."""
    root = tmp_path / "runs"
    made_run(root / "done", made_config("train.seed=3"))
    begun_run(root / "begun", made_config())
    stopped = begun_run(root / "stopped", made_config())
    stopped.log("train", step=12, tokens=12, seconds=1.0, loss=5.5)
    stopped.log("val", step=10, tokens=10, loss=5.25)
    save(stopped, 12)
    gone = begun_run(root / "gone", made_config())
    gone.write_summary(made_summary(steps=9, stopped_early=True, val_loss=6.5))
    diverged = begun_run(root / "diverged", made_config(recipe="record-03"))
    diverged.log("train", step=7, tokens=7, seconds=1.0, loss=float("nan"))
    nan = begun_run(root / "nan", made_config())
    nan.write_summary(made_summary(val_loss=None))
    made_run(root / "races/one/runs/a", made_config(track="pico"))
    for number, name in enumerate(("done", "begun", "stopped", "gone", "diverged", "nan")):
        for path in (root / name).glob("*.*"):
            os.utime(path, (1e9 + number, 1e9 + number))
    return root


def damage(root: Path) -> dict[str, str]:
    """Folders in which something is wrong, each with a word of what is said of it."""
    for name in ("torn", "typed", "deep", "config", "lost", "foreign-config", "binary", "kinds"):
        made_run(root / name, made_config())
    (root / "torn/summary.json").write_text('{"recipe": ')
    (root / "typed/summary.json").write_text('{"recipe": 3}')
    (root / "deep/summary.json").write_text("[" * 100_000)
    (root / "config/config.toml").write_text("")
    (root / "lost/config.toml").unlink()
    (root / "foreign-config/config.toml").write_text("[tool]\nx = 1\n")
    (root / "binary/config.toml").write_bytes(b"\xff\xfe\x00")
    (root / "kinds/summary.json").unlink()
    (root / "kinds/metrics.jsonl").write_bytes(
        b'{"kind": []}\n\xff\n{"kind": "train", "step": NaN, "loss": "x"}\n[[[\n{"kind": "val"}'
    )
    (root / "folder/config.toml").mkdir(parents=True)
    (root / "folder/metrics.jsonl").mkdir()
    (root / "empty").mkdir()
    (root / "notes").mkdir()
    (root / "notes/a.txt").write_text("")
    (root / "\udcff").mkdir()
    (root / "file").write_text("")
    return {
        "torn": "cannot be read as JSON", "typed": "recipe is 3", "deep": "nested",
        "config": "recipe", "lost": "no config.toml", "foreign-config": "tool",
        "binary": "cannot be read",
        "folder": "no config.toml", "empty": "it is empty", "notes": "no config.toml",
        "\udcff": "it is empty", "kinds": "before its first checkpoint",
    }  # fmt: skip


def by_name(found: list[Listed]) -> dict[str, Listed]:
    return {Path(run.path).name: run for run in found}


def test_states(runs: Path) -> None:
    with RunFolder(runs / "begun").locked():
        found = by_name(list_runs([runs]))
    assert {name: (run.state, run.detail, run.resumable) for name, run in found.items()} == {
        "done": ("finished", "", False),
        "begun": ("running", "", False),
        "stopped": ("stopped", "at step 12", True),
        "gone": ("stopped", "its checkpoints are gone", False),
        "diverged": ("failed", "the loss is not finite at step 7", False),
        "nan": ("failed", "its last loss is not finite", False),
        "a": ("finished", "", False),
    }
    done, stopped = found["done"], found["stopped"]
    assert (done.recipe, done.track, done.seed) == ("modern", "nano", 3)
    assert (done.steps, done.of_steps, done.dataset) == (40, 40, None)
    assert (stopped.steps, stopped.val_loss) == (12, 5.25)
    assert look(runs / "begun").detail == "before its first checkpoint"


def test_damage_is_a_row_and_never_an_error(tmp_path: Path) -> None:
    expected = damage(tmp_path)
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset/manifest.json").write_text("{}")
    foreign = {"empty", "notes", "\udcff"}
    assert by_name(list_runs([tmp_path])).keys() == expected.keys() - foreign
    found = by_name(list_runs([tmp_path, *(tmp_path / name for name in foreign)]))
    assert found.keys() == expected.keys()
    for name, word in expected.items():
        assert word in found[name].detail, name
    assert {found[name].state for name in ("empty", "notes", "\udcff")} == {"foreign"}
    damaged = expected.keys() - {"empty", "notes", "\udcff", "kinds"}
    assert {found[name].state for name in damaged} == {"damaged"}


def test_a_run_that_goes_on_after_its_result_is_told_by_its_log(runs: Path) -> None:
    run = RunFolder(runs / "done")
    run.log("train", step=44, tokens=44, seconds=1.0, loss=2.5)
    run.log("val", step=44, tokens=44, loss=2.25)
    assert look(run.path).steps == 40  # of its result
    with run.locked():
        assert (look(run.path).steps, look(run.path).val_loss) == (44, 2.25)
    save(run, 44)  # and was killed then
    assert (look(run.path).steps, look(run.path).val_loss) == (44, 2.25)


def test_a_validation_long_ago_is_found(runs: Path) -> None:
    run = RunFolder(runs / "begun")
    run.log("val", step=0, tokens=0, loss=5.0)
    run.log("val", step=1, tokens=1, loss=4.5)
    row = json.dumps({"kind": "train", "step": 2, "tokens": 2, "seconds": 1.0, "loss": 4.0}) + "\n"
    with run.metrics.open("a") as file:
        file.write(row * 2500 + "x" * 300_000 + "\n" + row * 10)
    assert (look(run.path).steps, look(run.path).val_loss) == (2, 4.5)


def test_to_ask_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run", made_config())
    with run.locked():
        assert run.in_use()
        with pytest.raises(RunError, match="in use"), run.locked():
            pass
    assert not run.in_use()
    with run.locked():
        pass


def test_the_table(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed(runs)
    lines = capsys.readouterr().out.splitlines()
    order = [line.split()[0].rpartition("/")[2] for line in lines[1:8]]
    assert order == ["a", "nan", "diverged", "gone", "stopped", "begun", "done"]
    assert any("train --resume --run" in line and "stopped" in line for line in lines)
    assert not any(line.startswith("compare: ") for line in lines)  # of different tracks
    assert any(" 5.2500 at 10 " in line for line in lines)  # 12 steps are done
    listed(runs, sort="loss")
    out = capsys.readouterr().out
    assert [line.split()[0].rpartition("/")[2] for line in out.splitlines()[1:4]] == [
        "done", "a", "stopped",
    ]  # fmt: skip
    assert "do not compare" in out
    listed(runs, recipe="record-03")
    assert len(capsys.readouterr().out.splitlines()) == 2
    listed(runs, state="finished", track="pico")
    assert "runs/a" in capsys.readouterr().out
    listed(runs, track="small")
    assert "none of the 7 runs" in capsys.readouterr().out


def test_another_dataset_than_the_tracks_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun_run(tmp_path / "a", made_config("data.dir=mine"))
    begun_run(tmp_path / "b", made_config('data.sources=["notes"]'))
    begun_run(tmp_path / "c", made_config())
    begun_run(tmp_path / "d", made_config(track="a-track-of-mine"))
    runs = by_name(list_runs([tmp_path]))
    assert [runs[name].dataset for name in "abcd"] == ["mine", "notes", None, "stdlib"]
    listed(tmp_path)
    assert "nano on mine" in capsys.readouterr().out


def test_only_experiments_on_one_text_are_worth_comparing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def hint() -> list[str]:
        capsys.readouterr()
        listed(tmp_path, sort="loss")
        return [line for line in capsys.readouterr().out.splitlines() if "compare:" in line]

    made_run(tmp_path / "a", made_config(), slope=0.09)
    made_run(tmp_path / "b", made_config("train.seed=1"), slope=0.08)
    other = made_run(tmp_path / "c", made_config("model.softcap=9.0"), slope=0.07)
    other.write_summary(made_summary(dataset_fingerprint="e" * 64))
    assert hint() == []  # another seed, another text
    made_run(tmp_path / "d", made_config("model.softcap=9.0"), slope=0.06)
    both = command("compare", str(tmp_path / "a"), str(tmp_path / "d"))
    assert hint() == [f"compare:  {both}"]


def test_a_loss_of_an_older_step_is_told_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begun_run(tmp_path / "a", made_config())
    run.log("val", step=0, tokens=0, loss=8.3178)
    run.write_summary(made_summary(steps=9, stopped_early=True, val_loss=8.3178))
    listed(tmp_path)
    assert " 8.3178 at 0 " in capsys.readouterr().out
    made_run(tmp_path / "b", made_config())
    assert look(tmp_path / "b").val_step == 40


def test_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs_command([runs], sort="date", track="", recipe="", state="failed", as_json=True)
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["runs"]
    assert [Path(run["path"]).name for run in found] == ["nan", "diverged"]
    assert found[0]["date"].startswith("2001-09-")


def test_where_there_are_none_the_next_command_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    listed()
    assert "train best --track nano" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("folder", "chosen", "expected"),
    [
        ("none", {}, "does not exist; name a folder of runs"),
        ("file", {}, "is a file; name a folder of runs"),
        ("", {"sort": "size"}, "date, loss, recipe"),
        ("", {"state": "done"}, "running, finished"),
    ],
)
def test_mistakes(tmp_path: Path, folder: str, chosen: dict[str, str], expected: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=expected):
        listed(tmp_path / folder, **chosen)


def test_a_damaged_record_of_the_text_is_a_note(tmp_path: Path) -> None:
    run = begun_run(tmp_path, made_config())
    run.dataset.write_text("{")
    known, notes = _trained_on(run)
    assert known is None
    assert "dataset.json cannot be read as JSON" in notes[0]
    assert "delete it" in notes[0]
