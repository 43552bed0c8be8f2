"""Runs side by side on the page: which belong together, and the numbers that compare them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from speedrun.report.page import page_data, read_inputs
from speedrun.science.compare import Entry
from speedrun.science.results import Ablation, Race
from speedrun.train.crossing import Look, crossing
from tests.report.made import begun_run, made_config, made_run


def test_seeds_are_one_group_and_settings_make_another(tmp_path: Path) -> None:
    configs = [
        made_config("train.seed=0"), made_config("train.seed=1"),
        made_config("model.softcap=15.0"), made_config(recipe="other"),
    ]  # fmt: skip
    data = page_data([made_run(tmp_path / f"{i}", c) for i, c in enumerate(configs)])
    assert [g["label"] for g in data["groups"]] == [
        "modern",
        "modern (model.softcap=15.0)",
        "other",
    ]
    assert [run["group"] for run in data["runs"]] == [0, 0, 1, 2]
    assert data["diff"] == [{"key": "model.softcap", "values": ["0.0", "15.0", "0.0"]}]


def test_runs_on_other_data_are_another_group(tmp_path: Path) -> None:
    mine = made_config("data.dir=/there/mine")
    runs = [
        made_run(tmp_path / "a", made_config(), dataset="1111111111"),
        made_run(tmp_path / "b", made_config("train.seed=1"), dataset="2222222222"),
        made_run(tmp_path / "c", mine, dataset="1111111111"),  # the same data, given by its folder
        made_run(tmp_path / "d", mine, dataset="3333333333"),
        made_run(tmp_path / "e", made_config("model.softcap=15.0"), dataset="2222222222"),
    ]
    for name, override in (("f", "train.seed=2"), ("g", "model.softcap=30.0")):
        runs.append(begun_run(tmp_path / name, made_config(override)))  # its dataset is not known
    settings = {"cap": ["model.softcap=15.0"]}
    ablation = Ablation.model_validate({"recipe": "modern", "effects": [], "settings": settings})
    data = page_data(runs, None, ablation)
    assert [run["group"] for run in data["runs"]] == [0, 1, 0, 2, 3, 0, 4]
    assert [group["label"] for group in data["groups"]] == [
        "modern",
        "modern (dataset 22222222)",
        "modern (dataset mine 33333333)",
        "modern (model.softcap=15.0, dataset 22222222)",  # not only `without cap`
        "modern (model.softcap=30.0)",
    ]
    datasets = ["11111111", "22222222", "33333333", "22222222", ""]
    assert data["diff"][-1] == {"key": "dataset", "values": datasets}


def test_an_ablation_names_its_groups(tmp_path: Path) -> None:
    configs = [
        made_config("model.softcap=15.0", "model.qk_norm=true"),
        made_config("model.softcap=0.0"),
        made_config("model.softcap=30.0"),
        made_config("model.softcap=15.0", "model.qk_norm=false", "model.unet_skips=true"),
    ]
    settings = {
        "cap": ["model.softcap=0.0", "model.qk_norm=true"],
        "model.softcap=30.0": ["model.softcap=30.0"],
    }
    runs = [made_run(tmp_path / f"{i}", config) for i, config in enumerate(configs)]
    ablation = Ablation.model_validate({"recipe": "modern", "effects": [], "settings": settings})
    data = page_data(runs, None, ablation)
    labels = [group["label"] for group in data["groups"]]
    assert labels == ["modern", "without cap", "model.softcap=30.0",
                      "modern (model.qk_norm=false, model.unet_skips=true)"]  # fmt: skip
    assert data["title"] == "What matters in modern on nano"


def test_an_ablation_names_code_that_it_took_out(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("# nobody runs it\n")
    use = f"custom.mlp.use={tmp_path}/mine.py:Gated"
    configs = [
        made_config(use, "custom.mlp.args.ratio=3.0"), made_config(),
        made_config(use, "custom.mlp.args.ratio=2.0"),
    ]  # fmt: skip
    settings = {
        "custom mlp Gated": ['custom.mlp.use=""'],
        "custom.mlp.args.ratio=2.0": ["custom.mlp.args.ratio=2.0"],
    }
    runs = [made_run(tmp_path / f"{i}", config) for i, config in enumerate(configs)]
    ablation = Ablation.model_validate({"recipe": "modern", "effects": [], "settings": settings})
    data = page_data(runs, None, ablation)
    labels = [group["label"] for group in data["groups"]]
    assert labels == ["modern", "without custom mlp Gated", "custom.mlp.args.ratio=2.0"]
    shown = {row["key"]: row["values"] for row in data["diff"]}
    assert shown["custom.mlp.use"] == ['"mine.py:Gated"', "-", '"mine.py:Gated"']
    assert len(shown["custom.mlp.code"][0]) == 64 + len('""')


def test_times_to_target_come_from_the_curves(tmp_path: Path) -> None:
    slow = [made_run(tmp_path / f"a{s}", made_config(f"train.seed={s}")) for s in range(3)]
    fast = [
        made_run(tmp_path / f"b{s}", made_config(f"train.seed={s}", recipe="fast"), slope=0.2)
        for s in range(3)
    ]
    rows = page_data([*slow, *fast])["race"]["metrics"]
    assert rows["steps_to_target"][0]["values"] == pytest.approx([30.0, 29.99, 29.98], abs=0.01)
    # Losses of 5 and 3 at steps 10 and 20: half of the way in the logarithm.
    steps = math.sqrt(10 * 20)
    assert rows["tokens_to_target"][1]["mean"] == pytest.approx(steps * 8192, rel=1e-3)
    assert rows["tokens_to_target"][1]["ratio"] == pytest.approx(steps / 30, rel=1e-3)
    assert rows["seconds_to_target"][1]["mean"] == pytest.approx(steps / 2, rel=1e-3)


def test_runs_that_shared_the_machine_have_no_times_to_compare(tmp_path: Path) -> None:
    alone = made_run(tmp_path / "alone", made_config())
    shared = made_run(tmp_path / "shared", made_config("train.seed=1", "machine.jobs=2"))
    data = page_data([alone, shared])
    assert [run["jobs"] for run in data["runs"]] == [1, 2]
    assert data["race"]["metrics"].keys() == {"tokens_to_target", "steps_to_target"}
    entry = Entry(recipe="modern", seed=0, tokens_to_target=8192)
    race = Race(target=4.0, jobs=2, entries=(entry,))
    assert "seconds_to_target" not in page_data([shared], race)["race"]["metrics"]


def test_the_page_and_a_race_file_say_the_same_of_the_same_runs(tmp_path: Path) -> None:
    """By the runs' curves and by the race's entries: ratios paired by seed, and not by order."""
    seeds = {"modern": (0, 1, 2), "fast": (2, 0, 1), "other": (3, 4, 5)}
    slopes = {"modern": (0.10, 0.12, 0.15), "fast": (0.30, 0.20, 0.24), "other": (0.2, 0.3, 0.25)}
    runs = [
        made_run(tmp_path / f"{recipe}{seed}", made_config(f"train.seed={seed}", recipe=recipe),
                 slope=slope, every=1)
        for recipe in seeds
        for seed, slope in zip(seeds[recipe], slopes[recipe], strict=True)
    ]  # fmt: skip
    rows = page_data(runs)["race"]["metrics"]["tokens_to_target"]
    entries = []
    for run in runs:
        config = run.load_config()
        looks = [Look(row["step"], row["loss"], 0.0, 0.0) for row in run.read_metrics("val")]
        here = next(i for i, look in enumerate(looks) if (look.loss or 0) <= 4.0)
        there = crossing(looks[here - 1], looks[here], 4.0)
        entries.append(Entry(
            recipe=config.recipe, seed=config.train.seed, cell_steps=1, steps_to_target=there.steps,
            tokens_to_target=there.tokens(config.batch.tokens),
        ))  # fmt: skip
    table = Race(target=4.0, entries=tuple(entries)).statistics()
    assert [row["ratio_method"] for row in rows] == ["paired", "paired", "Welch"]
    for row, recipe in zip(rows, seeds, strict=True):
        stated = table[recipe]["tokens_to_target"]
        assert (row["mean"], row["ratio"]) == (stated.mean, stated.ratio)
        assert (row["ratio_low"], row["ratio_high"]) == (stated.ratio_low, stated.ratio_high)


def test_a_race_file_brings_its_runs(tmp_path: Path) -> None:
    made_run(tmp_path / "runs" / "one", made_config())
    entry = {"recipe": "modern", "seed": 0, "run": "runs/one", "tokens_to_target": 81920}
    unlucky = {"recipe": "other", "seed": 0, "tokens_to_target": None}
    lucky = {"recipe": "other", "seed": 1, "tokens_to_target": 10}
    race = {"target": 4.2, "entries": [entry, unlucky, lucky], "command": "speedrun race x"}
    (tmp_path / "race.json").write_text(json.dumps(race))
    inputs = read_inputs([tmp_path])
    assert [run.path.name for run in inputs.runs] == ["one"]
    shown = page_data(inputs.runs, inputs.race)["race"]
    assert shown["target"] == 4.2
    assert shown["metrics"]["tokens_to_target"][0]["mean"] == 81920
    assert shown["metrics"]["steps_to_target"][0]["values"] == [10]
    assert shown["groups"] == [0, None]
    missed = shown["metrics"]["tokens_to_target"][1]
    assert missed == {"values": [None, 10], "n": 2, "reached": 1}  # no mean over the lucky seed


def test_machine_settings_make_no_group_of_their_own(tmp_path: Path) -> None:
    configs = [made_config(), made_config("machine.attention=dense", "machine.threads=1")]
    data = page_data([made_run(tmp_path / f"{i}", c) for i, c in enumerate(configs)])
    assert [run["group"] for run in data["runs"]] == [0, 0]
    assert data["diff"] == []
