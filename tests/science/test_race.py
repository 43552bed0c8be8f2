"""Races and ablations on the tiny world, their numbers recomputed from what the runs logged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scipy import stats as scipy_stats

from speedrun.config.files import names
from speedrun.config.resolve import resolve
from speedrun.data.build import build_dataset
from speedrun.errors import ConfigError, RunError
from speedrun.science import jobs
from speedrun.science.ablate import ablate, effects, family, techniques
from speedrun.science.race import race, statistics
from speedrun.train.run import RunFolder
from tests.conftest import TINY
from tests.train.children import speedrun_to_its_end
from tests.waiting import PATIENCE, wait_for

FAST = ("optimizer.head.lr=0.03", "train.target=4.9", "validation.every=2", "train.steps=12")
LONG = ("train.target=1.45", "validation.every=5", "train.steps=120")  # some 70 to the target


Losses = dict[str, list[float | None]]


@pytest.fixture
def _quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are processes all the same, but forked from one that has torch loaded."""
    monkeypatch.setattr(jobs, "speedrun_in_child", speedrun_to_its_end)


quick_starts = pytest.mark.usefixtures("_quick_starts")


def words(dataset: Path) -> list[str]:
    return [*TINY, f"data.dir={dataset}", *FAST]


def strip_times(result: dict[str, Any]) -> list[tuple[Any, ...]]:
    keys = ("recipe", "seed", "run", "tokens_to_target", "steps_to_target", "val_loss")
    return [tuple(entry[key] for key in keys) for entry in result["entries"]]


@pytest.mark.slow
@quick_starts
def test_a_race_counts_what_its_runs_logged_and_never_repeats_them(
    tiny_dataset: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('extends = "modern"\n[model]\nsoftcap = 15.0\n')
    said: list[str] = []

    def go() -> dict[str, Any]:
        return race(["modern", str(recipe)], "nano", 2, tmp_path / "race",
                    overrides=words(tiny_dataset), say=said.append)  # fmt: skip

    result = go()
    assert result["recipes"] == ["modern", "mine"]
    # Interleaved: all recipes with seed 0 come before any with seed 1.
    assert [(e["recipe"], e["seed"]) for e in result["entries"]] == [
        ("modern", 0), ("mine", 0), ("modern", 1), ("mine", 1),
    ]  # fmt: skip
    for entry in result["entries"]:
        rows = RunFolder(tmp_path / "race" / entry["run"]).read_metrics("val")
        first = next((row for row in rows if row["loss"] <= 4.9), None)
        assert first is not None, "the tiny race must reach its target"
        assert entry["tokens_to_target"] == first["tokens"]
        assert entry["steps_to_target"] == first["step"]
        assert rows[-1] == first  # the run stopped there
    tokens = {name: [e["tokens_to_target"] for e in result["entries"] if e["recipe"] == name]
              for name in result["recipes"]}  # fmt: skip
    row = result["statistics"]["mine"]["tokens_to_target"]
    assert row["mean"] == sum(tokens["mine"]) / 2
    assert row["ratio"] == pytest.approx(sum(tokens["mine"]) / sum(tokens["modern"]))
    assert json.loads((tmp_path / "race/race.json").read_text()) == result
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "race").rglob("summary.json")}
    said.clear()
    again = go()
    assert strip_times(again) == strip_times(result)
    assert all("found finished" in line for line in said)
    assert stamps == {p: p.stat().st_mtime_ns for p in (tmp_path / "race").rglob("summary.json")}


@pytest.mark.slow
@pytest.mark.timeout(900)
@quick_starts
def test_a_killed_race_goes_on(tiny_dataset: Path, tmp_path: Path) -> None:
    """Killed in the third of its four runs, after a step and long before the target."""
    settings = [*words(tiny_dataset), *LONG]
    command = [sys.executable, "-m", "speedrun", "race", "modern", "modern-cosine", "--seeds", "2",
               "--out", str(tmp_path / "race")]  # fmt: skip
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
    assert done.stdout.count("found finished") == 2
    cut = json.loads((tmp_path / "race/race.json").read_text())
    whole = race(["modern", "modern-cosine"], "nano", 2, tmp_path / "whole",
                 overrides=settings, say=lambda _: None)  # fmt: skip
    assert strip_times(cut) == strip_times(whole)
    assert (tmp_path / "race/race.html").stat().st_size < 5_000_000


@pytest.mark.slow
@quick_starts
def test_an_ablation_pairs_seeds(tiny_dataset: Path, tmp_path: Path) -> None:
    result = ablate("modern", "nano", 2, tmp_path / "out", switches=["model.qk_norm=false"],
                    overrides=words(tiny_dataset), say=lambda _: None)  # fmt: skip
    (row,) = [r for r in result["effects"] if r["metric"] == "val_loss"]
    losses: dict[bool, list[float]] = {True: [], False: []}
    for run in result["runs"]:
        folder = RunFolder(tmp_path / "out" / run)
        losses[folder.load_config().model.qk_norm].append(folder.read_metrics("val")[-1]["loss"])
    differences = [a - b for a, b in zip(losses[False], losses[True], strict=True)]
    assert row["effect"] == pytest.approx(sum(differences) / 2)
    assert row["p"] == pytest.approx(scipy_stats.ttest_1samp(differences, 0).pvalue)
    assert row["n"] == 2


def test_a_recipe_whose_seeds_did_not_all_arrive_has_no_mean() -> None:
    keys = ("steps_to_target", "seconds_to_target", "wall_seconds_to_target", "val_loss",
            "peak_memory_bytes")  # fmt: skip
    rest: dict[str, Any] = dict.fromkeys(keys, 1.0)
    entries: list[dict[str, Any]] = [
        {"recipe": "a", "tokens_to_target": 100, **rest},
        {"recipe": "a", "tokens_to_target": 120, **rest},
        {"recipe": "b", "tokens_to_target": 55, **rest},
        {"recipe": "b", "tokens_to_target": None, **rest},
        {"recipe": "c", "tokens_to_target": None, **rest},
        {"recipe": "c", "tokens_to_target": None, **rest},
    ]
    table = statistics(["a", "b", "c"], entries)
    assert table["b"]["tokens_to_target"] == {"n": 1, "of": 2}
    assert table["c"]["tokens_to_target"] == {"n": 0, "of": 2}
    assert table["a"]["tokens_to_target"]["ratio"] == 1.0


def test_effects_match_scipy_and_holm() -> None:
    control: Losses = {"val_loss": [3.0, 3.1, 3.2], "tokens_to_target": [10, None, 12],
               "seconds_to_target": [None, None, None]}  # fmt: skip
    variants: dict[str, Losses] = {
        "worse": {"val_loss": [3.2, 3.31, 3.39], "tokens_to_target": [20, 21, 23],
                  "seconds_to_target": [None, None, None]},
        "same": {"val_loss": [3.0, 3.12, 3.19], "tokens_to_target": [10, 11, 12],
                 "seconds_to_target": [1.0, 1.0, 1.0]},
    }  # fmt: skip
    rows = {(r["metric"], r["switch"]): r for r in effects(variants, control, 0.05)}
    worse = rows["val_loss", "worse"]
    expected = scipy_stats.ttest_rel([3.2, 3.31, 3.39], [3.0, 3.1, 3.2])
    assert worse["p"] == pytest.approx(expected.pvalue)
    assert worse["p_holm"] == pytest.approx(2 * expected.pvalue)
    assert worse["decided"] is True
    assert rows["val_loss", "same"]["decided"] is False
    assert rows["val_loss", "same"]["more_seeds"] > 0
    late = rows["tokens_to_target", "worse"]
    assert (late["n"], late["of"], late["effect"], late["decided"]) == (2, 3, None, False)
    assert rows["seconds_to_target", "same"]["effect"] is None


def test_the_techniques_of_a_recipe_are_those_it_has() -> None:
    record = techniques(resolve("record-18", "nano").config)
    assert {"Muon", "softcap", "value embeddings", "U-net skips", "window"} <= record.keys()
    assert "value residual" not in record
    assert "Muon" not in techniques(resolve("modern", "nano").config)
    for recipe in names("recipe"):
        for settings in techniques(resolve(recipe, "nano").config).values():
            resolve(recipe, "nano", settings)  # every one can be switched off alone


def test_mistakes_are_refused_before_any_run(tmp_path: Path) -> None:
    config = resolve("modern", "nano").config
    with pytest.raises(ConfigError, match=r"'model.softcpa'; nearest known: 'model.softcap'"):
        family(config, ["model.softcpa=1"])
    with pytest.raises(ConfigError, match="must differ"):
        race(["modern", "modern"], "nano", 2, tmp_path)
    with pytest.raises(ConfigError, match="no target"):
        race(["modern"], "nano", 2, tmp_path, overrides=["train.target=0.0"])
    with pytest.raises(ConfigError, match="at least 2"):
        ablate("modern", "nano", 1, tmp_path)
    with pytest.raises(ConfigError, match="probability"):
        ablate("modern", "nano", 2, tmp_path, alpha=5.0)
    with pytest.raises(ConfigError, match=r"train.seed is set by the command"):
        ablate("modern", "nano", 2, tmp_path, switches=["train.seed=5"])
    for word in ("train.seed=5", "train.stop=steps"):
        with pytest.raises(ConfigError, match=r"is set by the command"):
            race(["modern"], "nano", 2, tmp_path, overrides=[word])


def test_recipes_of_another_target_or_dataset_are_refused(
    tiny_dataset: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three\n" * 4000)
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
    with pytest.raises(ConfigError, match=r"a has the target 4.0, b 3.0"):
        race([a, b], str(track), 1, tmp_path / "race")
    with pytest.raises(ConfigError, match="different datasets"):
        race([a, recipe("c", tmp_path / "data", 4.0)], str(track), 1, tmp_path / "race")


@pytest.mark.slow
@quick_starts
def test_a_race_of_no_steps_and_one_cut_short(tiny_dataset: Path, tmp_path: Path) -> None:
    overrides = [*words(tiny_dataset), "train.target=9.0"]
    result = race(["modern", "record-03"], "nano", 1, tmp_path, overrides=overrides, budget=3)
    assert {entry["steps_to_target"] for entry in result["entries"]} == {0}
    assert "ratio" not in result["statistics"]["record-03"]["tokens_to_target"]
    for entry in result["entries"]:
        assert RunFolder(tmp_path / entry["run"]).load_config().steps == 3
    long = race(["modern"], "nano", 1, tmp_path, overrides=overrides, budget=10_000)
    run = RunFolder(tmp_path / long["entries"][0]["run"])
    assert run.load_config().steps == 12  # a budget does not lengthen a run


@pytest.mark.slow
@quick_starts
def test_a_recipe_edited_during_a_race_is_noticed(tiny_dataset: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('extends = "modern"\n')

    def edit(text: str) -> None:
        if "seed 1: running" in text:
            recipe.write_text('extends = "modern"\n[model]\nsoftcap = 15.0\n')

    with pytest.raises(RunError, match=r"model.softcap changed while the runs of mine"):
        race([str(recipe)], "nano", 2, tmp_path / "race", overrides=words(tiny_dataset), say=edit)
    recipe.write_text('extends = "modern"\n')  # taken back: the race can go on
    said: list[str] = []
    race([str(recipe)], "nano", 2, tmp_path / "race", overrides=words(tiny_dataset),
         say=said.append)  # fmt: skip
    assert [line.rpartition(": ")[2] for line in said[:2]] == ["found finished", "running"]
