"""Ablations: which techniques a recipe has, and what switching them off is found to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from scipy import stats as scipy_stats

from speedrun.config.experiment import differences
from speedrun.config.files import names
from speedrun.config.resolve import resolve
from speedrun.errors import ConfigError
from speedrun.science import children
from speedrun.science.ablate import ablate, changes, effects
from speedrun.science.compare import Entry
from speedrun.science.results import read_result
from speedrun.train.run import RunFolder
from tests.conftest import TINY
from tests.train.children import QuickChild


@pytest.mark.slow
def test_an_ablation_pairs_seeds(
    tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "Child", QuickChild)
    words = [*TINY, f"data.dir={tiny_dataset}", "optimizer.head.lr=0.03", "train.steps=12"]
    result = ablate(recipe="modern", track="nano", seeds=2, out=tmp_path,
                    switches=["model.qk_norm=false"], overrides=words, jobs_at_once=2,
                    say=print)  # fmt: skip
    (row,) = [effect for effect in result.effects if effect.metric == "val_loss"]
    losses: dict[bool, list[float]] = {True: [], False: []}
    for run in result.runs:
        folder = RunFolder(tmp_path / run)
        losses[folder.load_config().model.qk_norm].append(folder.read_metrics("val")[-1]["loss"])
    differences = [a - b for a, b in zip(losses[False], losses[True], strict=True)]
    assert row.effect == pytest.approx(sum(differences) / 2)
    assert row.p == pytest.approx(scipy_stats.ttest_1samp(differences, 0).pvalue)
    assert row.n == 2
    assert result.jobs == 2
    assert {effect.metric for effect in result.effects} == {"val_loss", "tokens_to_target"}
    assert read_result(tmp_path / "ablation.json") == result


def runs(
    losses: list[float], tokens: list[int | None], seconds: list[float] | None = None
) -> list[Entry]:
    return [
        Entry(recipe="", seed=seed, val_loss=losses[seed], tokens_to_target=tokens[seed],
              seconds_to_target=seconds[seed] if seconds else None)
        for seed in range(3)
    ]  # fmt: skip


def test_effects_match_scipy_and_holm() -> None:
    control = runs([3.0, 3.1, 3.2], [10, None, 12])
    variants = {
        "worse": runs([3.2, 3.31, 3.39], [20, 21, 23]),
        "same": runs([3.0, 3.12, 3.19], [10, 11, 12], [1.0, 1.0, 1.0]),
    }
    rows = {(row.metric, row.switch): row for row in effects(variants, control, 0.05)}
    worse = rows["val_loss", "worse"]
    expected = scipy_stats.ttest_rel([3.2, 3.31, 3.39], [3.0, 3.1, 3.2])
    assert worse.p == pytest.approx(expected.pvalue)
    assert worse.p_holm == pytest.approx(2 * expected.pvalue)
    assert worse.decided is True
    assert worse.more_seeds == 0
    same = rows["val_loss", "same"]
    assert same.decided is False
    assert (same.more_seeds or 0) > 0
    late = rows["tokens_to_target", "worse"]
    assert (late.n, late.of, late.effect, late.decided) == (2, 3, None, False)
    assert rows["seconds_to_target", "same"].effect is None


def test_the_techniques_of_a_recipe_are_those_it_has() -> None:
    record = changes(resolve("record-18", "nano").config, [])
    assert {"Muon", "softcap", "value embeddings", "U-net skips", "window"} <= record.keys()
    assert record["Muon"] == ('optimizer.kind="adamw"',)
    assert "value residual" not in record
    assert "Muon" not in changes(resolve("modern", "nano").config, [])
    # GPT-2's learned positions are not half of a rotary embedding.
    assert "half-truncated rotary" not in changes(resolve("baseline", "nano").config, [])
    for recipe in names("recipe"):
        for settings in changes(resolve(recipe, "nano").config, []).values():
            resolve(recipe, "nano", settings)  # every one can be switched off alone


def test_switches_are_techniques_by_name_or_keys() -> None:
    config = resolve("record-18", "nano").config
    asked = ["window", "model.softcap=30.0", "Muon"]
    off = changes(config, [])
    assert changes(config, asked) == {
        "window": off["window"], "model.softcap=30.0": ("model.softcap=30.0",), "Muon": off["Muon"]
    }  # fmt: skip
    assert len(off["window"]) > 1  # more keys than one switch could name


def test_a_window_widened_in_validation_can_be_switched_off() -> None:
    widened = ["validation.window=512"]
    settings = changes(resolve("record-18", "nano", widened).config, [])["window"]
    config = resolve("record-18", "nano", [*widened, *settings]).config
    assert (config.attention.window, config.validation.window) == ("none", 0)


def test_mistakes_are_refused_before_any_run(tmp_path: Path) -> None:
    def refused(sentence: str, seeds: int = 2, alpha: float = 0.05, switch: str = "") -> None:
        with pytest.raises(ConfigError, match=sentence):
            ablate(recipe="modern", track="nano", seeds=seeds, out=tmp_path, alpha=alpha,
                   switches=[switch] if switch else [], say=print)  # fmt: skip

    refused(r"'model.softcpa'; nearest known: 'model.softcap'", switch="model.softcpa=1")
    refused("no technique of that name, only ", switch="Muon")
    refused("at least 2", seeds=1)
    refused("probability", alpha=5.0)
    refused("the command sets train.seed itself", switch="train.seed=5")
    assert list(tmp_path.iterdir()) == []


def test_code_of_ones_own_is_a_technique_and_its_arguments_are_switches(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Gated: ...\n")
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        'extends = "modern"\n[custom.mlp]\nuse = "mine.py:Gated"\nargs = { ratio = 3.0 }\n'
    )
    config = resolve(str(recipe), "nano").config
    assert changes(config, [])["custom mlp Gated"] == ('custom.mlp.use=""',)
    without = resolve(str(recipe), "nano", ['custom.mlp.use=""']).config
    assert not differences(without, resolve("modern", "nano").config)
    switch = "custom.mlp.args.ratio=2.0"
    assert changes(config, [switch]) == {switch: (switch,)}
    other = resolve(str(recipe), "nano", [switch]).config
    assert [one.key for one in differences(config, other)] == ["custom.mlp.args.ratio"]
