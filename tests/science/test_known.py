"""Tunings that come with the package: they are of the recipes that are there, and of no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from speedrun.commands.ladder import TRIALS
from speedrun.config.files import optimizers
from speedrun.science.jobs import config_of
from speedrun.science.known import TUNED, known_tuning
from speedrun.science.space import Budget

USUAL = Budget(trials=TRIALS)


MADE = sorted(path.stem for path in TUNED.glob("*.json"))


@pytest.mark.parametrize("recipe", MADE)
def test_every_row_of_the_track_states_what_was_found_for_it(recipe: str) -> None:
    found = known_tuning(recipe, config_of(recipe, "optimizer", ()), "optimizer", USUAL)
    assert found is not None, "tune it again and state what is found"
    assert len(found.trials) == TRIALS
    assert found.ranked[0].number == found.best
    assert found.rows != "spread", "on rows apart from those that it is judged by"
    assert min(found.seeds) >= 1000


def test_no_other_tuning_is_there() -> None:
    assert {path.stem for path in TUNED.glob("*.json")} <= {*optimizers()}


@pytest.mark.skipif("muon" not in MADE, reason="NOT TESTED: it is not tuned yet")
def test_it_counts_for_nothing_else(tmp_path: Path) -> None:
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
    own = tmp_path / "muon.toml"  # as a user may call it
    own.write_text('extends = "muon"\n')
    assert known_tuning(str(own), config_of(str(own), "optimizer", ()), "optimizer", USUAL) is None
