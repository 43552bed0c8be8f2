"""Races on the tiny world, their numbers recomputed from what the runs logged."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from speedrun.data.build import build_dataset
from speedrun.errors import ConfigError, RunError
from speedrun.science import children
from speedrun.science.race import race, target_above
from speedrun.science.results import Race, read_result
from speedrun.train.run import RunFolder
from tests.conftest import TINY
from tests.train.children import QuickChild
from tests.waiting import PATIENCE, wait_for

FAST = ("optimizer.head.lr=0.03", "train.target=4.9", "validation.every=2", "train.steps=12")
LONG = ("train.target=1.45", "validation.every=5", "train.steps=120")  # some 70 to the target


@pytest.fixture
def _quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are processes all the same, but forked from one that has torch loaded."""
    monkeypatch.setattr(children, "Child", QuickChild)


quick_starts = pytest.mark.usefixtures("_quick_starts")


def words(dataset: Path) -> list[str]:
    return [*TINY, f"data.dir={dataset}", *FAST]


nano_race = partial(race, track="nano", seeds=2, say=print)


def strip_times(result: Race) -> list[tuple[Any, ...]]:
    return [
        (e.recipe, e.seed, e.run, e.tokens_to_target, e.steps_to_target, e.val_loss)
        for e in result.entries
    ]


@pytest.mark.slow
@quick_starts
def test_a_race_counts_what_its_runs_logged_and_never_repeats_them(
    tiny_dataset: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('extends = "modern"\n[model]\nsoftcap = 15.0\n')
    said: list[str] = []

    def go() -> Race:
        return nano_race(recipes=["modern", str(recipe)], out=tmp_path / "race",
                         overrides=words(tiny_dataset), say=said.append)  # fmt: skip

    result = go()
    assert result.recipes == ("modern", "mine")
    # Interleaved: all recipes with seed 0 come before any with seed 1.
    assert [(e.recipe, e.seed) for e in result.entries] == [
        ("modern", 0), ("mine", 0), ("modern", 1), ("mine", 1),
    ]  # fmt: skip
    for entry in result.entries:
        rows = RunFolder(tmp_path / "race" / str(entry.run)).read_metrics("val")
        first = next((row for row in rows if row["loss"] <= 4.9), None)
        assert first is not None, "the tiny race must reach its target"
        before = rows[rows.index(first) - 1]
        share = (before["loss"] - 4.9) / (before["loss"] - first["loss"])
        between = math.exp(share * math.log(first["step"] / before["step"]))
        crossing = before["step"] * between
        assert entry.steps_to_target == pytest.approx(crossing)
        assert entry.tokens_to_target == round(crossing * 256)
        assert entry.cell_steps == first["step"] - before["step"]
        assert entry.first_validation_tokens == first["tokens"]
        assert rows[-1] == first  # the run stopped there
    tokens = {name: [e.tokens_to_target or 0 for e in result.entries if e.recipe == name]
              for name in result.recipes}  # fmt: skip
    row = result.statistics()["mine"]["tokens_to_target"]
    assert row.mean == sum(tokens["mine"]) / 2
    assert row.ratio == pytest.approx(sum(tokens["mine"]) / sum(tokens["modern"]))
    assert row.ratio_method == "paired"
    file = tmp_path / "race/race.json"
    assert read_result(file) == result
    assert json.loads(file.read_text())["statistics"]["mine"]["tokens_to_target"] == row.as_dict()
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "race").rglob("summary.json")}
    said.clear()
    again = go()
    assert strip_times(again) == strip_times(result)
    assert all("found finished" in line for line in said)
    assert stamps == {p: p.stat().st_mtime_ns for p in (tmp_path / "race").rglob("summary.json")}


@pytest.mark.slow
@pytest.mark.timeout(900)
@quick_starts
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_killed_race_goes_on(tiny_dataset: Path, tmp_path: Path, jobs: int) -> None:
    """Killed in the third of its four runs, after a step and long before the target."""
    settings = [*words(tiny_dataset), *LONG]
    command = [sys.executable, "-m", "speedrun", "race", "modern", "modern-cosine", "--seeds", "2",
               "--out", str(tmp_path / "race"), "--jobs", str(jobs)]  # fmt: skip
    for word in settings:
        command += ["--set", word]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    seen = ""
    for line in child.stdout:
        seen += line
        if line.startswith("[3/4]"):
            break

    def begun() -> bool:
        runs = (tmp_path / "race/runs").glob("modern-s1-*")
        return any(RunFolder(run).read_metrics("train") for run in runs)

    wait_for(begun, "a step of the third run")
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert seen.count("running") == 3
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("found finished") in ({2} if jobs == 1 else {1, 2})
    cut = read_result(tmp_path / "race/race.json")
    assert isinstance(cut, Race)
    recipes = ["modern", "modern-cosine"]
    whole = nano_race(recipes=recipes, out=tmp_path / "whole", overrides=settings,
                      jobs_at_once=jobs)  # fmt: skip
    assert strip_times(cut) == strip_times(whole)
    assert (tmp_path / "race/race.html").stat().st_size < 5_000_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_race_asked_to_stop_leaves_checkpoints_and_goes_on_as_it_was_begun(
    tiny_dataset: Path, tmp_path: Path
) -> None:
    """SIGTERM comes to the race alone, while both of its runs are training."""
    command = [sys.executable, "-m", "speedrun", "race", "modern", "modern-cosine", "--seeds", "1",
               "--out", str(tmp_path)]  # fmt: skip
    for word in (*words(tiny_dataset), *LONG, "train.steps=20000", "train.target=0.01"):
        command += ["--set", word]
    child = subprocess.Popen([*command, "--jobs", "2"], stdout=subprocess.PIPE, text=True)

    def runs() -> list[RunFolder]:
        return [RunFolder(path) for path in sorted((tmp_path / "runs").glob("*"))]

    wait_for(lambda: [bool(run.read_metrics("train")) for run in runs()] == [True, True],
             "a step of both runs")  # fmt: skip
    child.send_signal(signal.SIGTERM)
    said, _ = child.communicate(timeout=PATIENCE)
    assert child.returncode == 128 + signal.SIGTERM
    assert said.endswith("stopped; the same command goes on from the checkpoints\n")
    steps = []
    for run in runs():
        summary = run.read_summary()
        assert summary is not None
        assert summary.stopped_early
        assert run.checkpoint(summary.steps).step == summary.steps > 0
        steps.append(summary.steps)
    # The same command without --jobs, to be stopped again: as it was begun, from the checkpoints.
    again = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def resumed() -> list[int]:
        return [row["step"] for run in runs() for row in run.read_metrics("resume")]

    wait_for(lambda: len(resumed()) == 2, "both runs to go on")
    again.send_signal(signal.SIGTERM)
    said, _ = again.communicate(timeout=PATIENCE)
    assert said.startswith("runs are made 2 at a time on 1 thread each")
    assert resumed() == steps


def test_mistakes_are_refused_before_any_run(tmp_path: Path) -> None:
    def refused(sentence: str, *recipes: str, seeds: int = 2, words: tuple[str, ...] = ()) -> None:
        with pytest.raises(ConfigError, match=sentence):
            nano_race(recipes=recipes, seeds=seeds, out=tmp_path, overrides=words)

    refused("two recipes of the race are called 'modern'", "modern", "modern")
    refused("--seeds 0", "modern", seeds=0)
    for word in ("train.seed=5", "train.stop=steps", "machine.jobs=2"):
        refused("cannot be used here: the command sets", "modern", words=(word,))
    assert list(tmp_path.iterdir()) == []


def test_recipes_of_another_target_or_dataset_are_refused(
    tiny_dataset: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"one two three {line}\n" for line in range(3000)))
    build_dataset([str(text)], tmp_path / "data", "byte", max_document_bytes=2048)
    track = tmp_path / "open.toml"
    track.write_text('why = "no target, no data"\n')

    def recipe(name: str, dataset: Path, target: float) -> str:
        path = tmp_path / f"{name}.toml"
        path.write_text(
            f'extends = "modern"\n[data]\ndir = "{dataset}"\n[train]\ntarget = {target}\n'
        )
        return str(path)

    a, b = recipe("a", tiny_dataset, 4.0), recipe("b", tiny_dataset, 3.0)
    c = recipe("c", tmp_path / "data", 4.0)
    for other, sentence in (
        (b, "a has the target 4.0, b 3.0"), (c, "a and c are trained on different datasets"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=sentence):
            race(recipes=[a, other], track=str(track), seeds=1, out=tmp_path / "race", say=print)


@pytest.mark.slow
@quick_starts
def test_a_race_of_no_steps_and_one_cut_short(tiny_dataset: Path, tmp_path: Path) -> None:
    one_seed = partial(nano_race, seeds=1, out=tmp_path,
                       overrides=[*words(tiny_dataset), "train.target=9.0"])  # fmt: skip
    result = one_seed(recipes=["modern", "record-03"], budget=3)
    assert {entry.steps_to_target for entry in result.entries} == {0}
    assert result.statistics()["record-03"]["tokens_to_target"].ratio is None
    for entry in result.entries:
        assert RunFolder(tmp_path / str(entry.run)).load_config().steps == 3
    long = one_seed(recipes=["modern"], budget=10_000)
    run = RunFolder(tmp_path / str(long.entries[0].run))
    assert run.load_config().steps == 12  # a budget does not lengthen a run


@pytest.mark.slow
@quick_starts
def test_a_recipe_edited_during_a_race_is_noticed(tiny_dataset: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('extends = "modern"\n')

    def edit(text: str) -> None:
        if "seed 1: running" in text:
            recipe.write_text('extends = "modern"\n[model]\nsoftcap = 15.0\n')

    go = partial(nano_race, recipes=[str(recipe)], out=tmp_path / "race",
                 overrides=words(tiny_dataset))  # fmt: skip
    with pytest.raises(RunError, match=r"model.softcap changed while the runs of mine"):
        go(say=edit)
    recipe.write_text('extends = "modern"\n')  # taken back: the race can go on
    said: list[str] = []
    go(say=said.append)
    assert [line.rpartition(": ")[2] for line in said[:2]] == ["found finished", "running"]


@quick_starts
def test_a_race_on_a_few_words_fits_them_and_finds_its_target(tmp_path: Path) -> None:
    """The children come to the very configs that the race planned, so their runs are found."""
    (tmp_path / "a.txt").write_text("".join(f"{n} and {n} are {n + n}\n" for n in range(90)))
    build_dataset([str(tmp_path / "a.txt")], tmp_path / "mine", "byte")
    said: list[str] = []
    tiny = ["model.layers=2", "model.width=32", "model.heads=2", "machine.threads=1"]
    more = [*tiny, f"data.dir={tmp_path / 'mine'}", "train.steps=6"]
    begin = partial(race, track="pico", seeds=1, recipes=["modern", "baseline"],
                    out=tmp_path / "race", overrides=more)  # fmt: skip
    found = begin(say=said.append)
    assert said[0] == "no target is set: modern is trained to its end first, to find one"
    run = RunFolder(next((tmp_path / "race/runs").glob("modern_to_its_end-s999-*")))
    summary = run.read_summary()
    assert summary is not None
    assert summary.target is None
    assert found.target == math.ceil(10 * min(run.validation_losses().values())) / 10
    assert [entry.recipe for entry in found.entries] == ["modern", "baseline"]
    for entry in found.entries:
        config = RunFolder(tmp_path / "race" / str(entry.run)).load_config()
        assert config.train.target == found.target
        assert config.batch.tokens < 4_096  # that of the track
    again = begin(say=said.append)
    assert strip_times(again) == strip_times(found)
    assert len([line for line in said if line.endswith(": running")]) == 3


def test_a_target_is_found_below_what_a_run_begins_with() -> None:
    """Of a small text: the loss falls and then rises above the first, as it is learnt by heart."""
    assert target_above({0: 6.4615, 4: 5.4671, 8: 6.9311, 20: 8.9102}, "best") == 5.5
    assert target_above({0: 6.4615, 20: 6.2999}, "best") == 6.3
    for losses in ({0: 6.4615, 20: 8.9102}, {0: 6.4615, 4: 6.4102, 20: 8.9102}):
        with pytest.raises(ConfigError, match=r"from more text, or set .* train.target=LOSS"):
            target_above(losses, "best")
