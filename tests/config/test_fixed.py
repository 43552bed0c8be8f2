"""What a track fixes: nobody changes it but the commands, and a refusal says what is free."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from speedrun.config.experiment import all_values
from speedrun.config.files import names, optimizers
from speedrun.config.fixed import of_track
from speedrun.config.resolve import resolve
from speedrun.errors import ConfigError
from speedrun.science.ablate import changes
from speedrun.science.jobs import LAST_LOSS, refuse_own_keys
from speedrun.science.records import Broken, Records
from speedrun.science.track import setting_broken

FREE = "free there are optimizer, schedule, machine, model.init"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model.width=128", "model.width = 128 (override) cannot be used: track optimizer fixes "
         "model.width at 96"),
        ("batch.tokens=4096", "fixes batch.tokens at 2048"),
        ("validation.rows=last", "fixes validation.rows at 'spread'"),
        ("validation.every=64", "fixes validation.every at"),
        ("train.target=9.0", "fixes train.target at"),
        ("data.dir=mine", "fixes data.dir at ''"),
        ("custom.mlp.use=torch.nn:Linear", "fixes custom.mlp.use"),
    ],
)  # fmt: skip
def test_a_users_word_for_what_is_fixed_is_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve("adamw", "optimizer", [word])
    assert said in str(refused.value)
    assert FREE in str(refused.value)


@pytest.mark.parametrize(
    "word",
    ["model.init=gpt2", "model.zero_init_head=false", "optimizer.head.lr=0.1", "schedule.warmup=7",
     "train.steps=9", "train.seed=3", "train.stop=target", "machine.threads=1",
     "custom.schedule.use=torch.nn:Linear"],
)  # fmt: skip
def test_what_is_free_can_be_set(word: str) -> None:
    resolve("adamw", "optimizer", [word])


def test_a_recipe_may_state_what_the_track_has_and_nothing_else(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('extends = "adamw"\n[model]\nwidth = 96\n[data]\nsources = "stdlib"\n')
    resolve(str(recipe), "optimizer")
    # Even where the track's own value would have won: the entry is not what its author thinks.
    recipe.write_text('extends = "adamw"\n[model]\nwidth = 128\n')
    with pytest.raises(ConfigError, match=r"model.width = 128 \(recipe .*mine.toml\).*at 96"):
        resolve(str(recipe), "optimizer")
    with pytest.raises(ConfigError, match=r"\(recipe record-.*track optimizer fixes"):
        resolve("best", "optimizer")


def test_the_commands_set_other_rows_and_no_target_for_their_own_runs() -> None:
    config = resolve("adamw", "optimizer", [*LAST_LOSS, "validation.rows:=between"]).config
    assert (config.train.target, config.validation.rows) == (0.0, "between")
    with pytest.raises(ConfigError, match=r"unknown key 'model.width:'"):
        resolve("adamw", "optimizer", ["model.width:=128"])
    with pytest.raises(ConfigError, match=r"the command sets validation.rows itself"):
        refuse_own_keys(["validation.rows:=last"], ())


def test_a_track_of_ones_own_fixes_its_own_values(tmp_path: Path) -> None:
    track = tmp_path / "mine.toml"
    track.write_text('extends = "optimizer"\n[model]\nwidth = 64\n')
    assert resolve("adamw", str(track)).config.model.width == 64
    with pytest.raises(ConfigError, match="at 64"):
        resolve("adamw", str(track), ["model.width=96"])
    track.write_text('extends = "optimizer"\nfree = ["modle.width"]\n')
    with pytest.raises(ConfigError, match=r"'modle.width', which is no key; nearest known: 'model"):
        resolve("adamw", str(track))
    track.write_text("fixed = [1]\n")
    with pytest.raises(ConfigError, match="fixed and free a track's lists of keys"):
        resolve("adamw", str(track))


def test_a_run_that_changed_what_is_fixed_is_none_of_the_track() -> None:
    """However it came to be: its config was edited, or it was resumed with --force."""
    plain = resolve("muon", "optimizer").config
    wider = plain.model_copy(update={"model": plain.model.model_copy(update={"mlp_ratio": 8})})
    free = plain.model_copy(update={"model": plain.model.model_copy(update={"init": "gpt2"})})
    broken = [setting_broken(cast(Records, SimpleNamespace(config=one)))
              for one in (plain, free, wider)]  # fmt: skip
    assert broken == [None, None, Broken("the track's own", "model.mlp_ratio is 8, not 4")]


def test_an_ablation_leaves_alone_what_is_fixed() -> None:
    config = resolve("normuon", "optimizer").config
    assert "QK-norm" in changes(config, [])
    free = changes(config, [], of_track("optimizer"))
    assert "QK-norm" not in free
    assert {"Muon", "NorMuon", "zero-initialised projections"} <= free.keys()


def test_entries_of_the_optimizer_track_differ_in_their_optimizer_alone() -> None:
    assert not set(optimizers()) & set(names("recipe"))
    rival = all_values(resolve("adamw", "optimizer").config)
    matrices = ("optimizer.kind", "optimizer.hidden.", "optimizer.muon.", "optimizer.head.lr")
    for name in optimizers():
        values = all_values(resolve(name, "optimizer").config)
        changed = {key for key in {**values, **rival} if values.get(key) != rival.get(key)}
        assert all(key.startswith(matrices) for key in changed), name
        assert bool(changed) == (name != "adamw")
