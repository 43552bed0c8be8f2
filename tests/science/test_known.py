"""Tunings that come with the package: they are of the recipes that are there, and of no others."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from speedrun.commands.ladder import TRIALS
from speedrun.config.experiment import all_values, differences
from speedrun.config.files import optimizers
from speedrun.config.keys import with_elements
from speedrun.science import known
from speedrun.science.jobs import config_of
from speedrun.science.known import ROUNDED, TUNED, as_guessed, known_tuning
from speedrun.science.ladder import ladder, tuned_on
from speedrun.science.space import Budget
from speedrun.science.tune import default_ranges

USUAL = Budget(trials=TRIALS)


@pytest.mark.parametrize("recipe", optimizers())
def test_every_row_of_the_track_states_what_was_found_for_it(recipe: str) -> None:
    found = known_tuning(recipe, config_of(recipe, "optimizer", ()), "optimizer", USUAL)
    assert found is not None, "tune it again and state what is found"
    assert len(found.trials) == TRIALS
    assert found.ranked[0].number == found.best
    assert found.rows != "spread", "on rows apart from those that it is judged by"
    assert min(found.seeds) >= 1000


@pytest.mark.parametrize("recipe", optimizers())
def test_another_search_begins_where_the_first_one_did(recipe: str, tmp_path: Path) -> None:
    found = known_tuning(recipe, config_of(recipe, "optimizer", ()), "optimizer", USUAL)
    assert found is not None
    assert found.as_it_stands is not None
    file = as_guessed(recipe, "optimizer", tmp_path)
    guessed = config_of(file, "optimizer", ())
    values = with_elements(all_values(guessed))
    for key, value in found.as_it_stands.values.items():
        assert values[key] == pytest.approx(value, rel=ROUNDED)
    assert [str(one) for one in default_ranges(guessed, "optimizer")] == [*map(str, found.over)]
    changed = {key for key, *_ in differences(config_of(recipe, "optimizer", ()), guessed)}
    assert changed <= {key.partition("[")[0] for key in found.as_it_stands.values} | {"recipe"}


def test_a_recipe_of_ones_own_is_searched_around_what_it_states(tmp_path: Path) -> None:
    assert as_guessed("modern", "optimizer", tmp_path) == "modern"
    assert [*tmp_path.iterdir()] == []


def test_a_text_may_be_held_out(tmp_path: Path) -> None:
    assert tuned_on("optimizer") == "optimizer"
    assert tuned_on("optimizer-prose") == "optimizer"
    own = tmp_path / "own.toml"
    own.write_text('extends = "optimizer"\nsigma = 0.01\n[data]\nsources = ["docstrings"]\n')
    assert tuned_on(str(own)) == str(own)
    own.write_text('tuned_on = "other.toml"\n' + own.read_text())
    assert tuned_on(str(own)) == str(tmp_path / "other.toml")


def test_a_held_out_text_by_itself_needs_no_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a recipe states was compared with its config on that text, where nothing is tuned."""
    tables = Mock(return_value=Mock(add=Mock(return_value=0)))
    monkeypatch.setattr("speedrun.science.ladder.Table", tables)
    monkeypatch.setattr("speedrun.science.ladder._tune", None)
    said: list[str] = []
    ladder(recipes=["adamw", "muon"], tracks=["optimizer-prose"], tuned=USUAL, seeds=2,
           first_seed=0, out=tmp_path, say=said.append)  # fmt: skip
    assert [line.partition(" states what was found by 20 trials")[0] for line in said] == [
        "adamw", "muon",
    ]  # fmt: skip


def test_no_other_tuning_is_there() -> None:
    assert {path.stem for path in TUNED.glob("*.json")} == {*optimizers()}


def test_it_counts_for_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("muon", "optimizer", ())
    assert known_tuning("muon", config, "optimizer", USUAL) is not None
    assert known_tuning("muon", config, "optimizer", Budget(trials=13)) is None
    assert known_tuning("muon", config, "optimizer-prose", USUAL) is None
    for word in (
        "optimizer.muon.lr=0.1",
        "optimizer.muon.momentum=0.5",
        "schedule.cooldown=100",
        "optimizer.muon.weight_decay=0.1",
    ):
        other = config_of("muon", "optimizer", (word,))
        assert known_tuning("muon", other, "optimizer", USUAL) is None, word
    with monkeypatch.context() as other_track:
        other_track.setattr(known, "track_hash", lambda _: "of a track whose target was changed")
        assert known_tuning("muon", config, "optimizer", USUAL) is None
    own = tmp_path / "muon.toml"  # as a user may call it
    own.write_text('extends = "muon"\n')
    assert known_tuning(str(own), config_of(str(own), "optimizer", ()), "optimizer", USUAL) is None
