"""The race that comes with the package: what it says of a run, and of which it says nothing."""

from __future__ import annotations

import pytest

from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.science.committed import beside_the_race, committed_race, raced_as

RACE = committed_race()
RACED = ("record-02", "record-03", "record-18", "best")


def config(recipe: str = "best", track: str = "nano", *overrides: str) -> Config:
    return resolve(recipe, track, overrides).config


def test_the_race_is_one_to_the_target_of_its_track_against_gpt2() -> None:
    assert RACE.order[0] == raced_as("baseline", RACE)
    assert resolve("baseline", RACE.track or "").config.train.target == RACE.target
    assert RACE.finished


@pytest.mark.parametrize("recipe", RACED)
def test_a_run_is_put_beside_its_recipe_and_the_baseline(recipe: str) -> None:
    """The interval is that of the table of the race, whose ratios are the other way round."""
    table, said = RACE.statistics(), beside_the_race(config(recipe))
    row = table[raced_as(recipe, RACE) or ""]["tokens_to_target"]
    assert row.ratio is not None
    assert row.ratio_low is not None
    assert row.ratio_high is not None
    assert f"on {RACE.track} {recipe} takes {row.mean:,.0f} tokens to {RACE.target}, " in said
    assert f"GPT-2 baseline {table[RACE.order[0]]['tokens_to_target'].mean:,.0f}: " in said
    assert (
        f"{1 / row.ratio:.1f} times as many [{1 / row.ratio_high:.1f}, {1 / row.ratio_low:.1f}]"
        in said
    )


def test_seed_machine_and_end_of_a_run_do_not_matter() -> None:
    other = config("best", "nano", "train.seed=5", "train.stop=target", "machine.threads=1")
    assert beside_the_race(other)


@pytest.mark.parametrize(
    "ran",
    [
        config("best", "nano", "model.softcap=30.0"),
        config("best", "nano", "train.steps=20"),
        config("record-16"),
        config("baseline"),
        config().model_copy(update={"recipe": "mine"}),
    ],
)
def test_nothing_is_said_of_what_was_not_raced(ran: Config) -> None:
    assert beside_the_race(ran) == ""
