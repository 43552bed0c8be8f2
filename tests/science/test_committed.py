"""The race that comes with the package: what it says of a run, and of which it says nothing."""

from __future__ import annotations

from typing import Any

import pytest

from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.science.committed import beside_the_race, committed_race
from speedrun.train.summary import Summary

RACE = committed_race()


def config(recipe: str = "best", track: str = "nano", *overrides: str) -> Config:
    return resolve(recipe, track, overrides).config


def summary(**changes: Any) -> Summary:
    facts: dict[str, Any] = {
        "recipe": "best", "track": "nano", "params": 1, "steps": 90, "tokens": 90 * 8192,
        "train_seconds": 60.0, "wall_seconds": 70.0, "val_loss": 3.1, "target": RACE.target,
        "reached_target": True, "tokens_to_target": 245_760, "seed": 0,
        "dataset_fingerprint": RACE.dataset_fingerprint,
    }  # fmt: skip
    return Summary(**(facts | changes))


def test_the_race_is_one_to_the_target_of_its_track_against_gpt2() -> None:
    assert RACE.order[0] == "baseline"
    assert resolve("baseline", RACE.track or "").config.train.target == RACE.target


@pytest.mark.parametrize("recipe", RACE.order[1:])
def test_a_run_is_put_beside_its_recipe_and_the_baseline(recipe: str) -> None:
    """The interval is that of the table of the race, whose ratios are the other way round."""
    table = RACE.statistics()
    said = beside_the_race(config(recipe), summary(recipe=recipe))
    row = table[recipe]["tokens_to_target"]
    assert row.ratio is not None
    assert row.ratio_low is not None
    assert row.ratio_high is not None
    assert f"{recipe} took {row.mean:,.0f} tokens (mean of {row.n} seeds)" in said
    assert f"GPT-2 baseline {table['baseline']['tokens_to_target'].mean:,.0f}: " in said
    assert said.endswith(
        f"{1 / row.ratio:.1f} times as many [{1 / row.ratio_high:.1f}, {1 / row.ratio_low:.1f}]"
    )


def test_seed_machine_and_end_of_a_run_do_not_matter() -> None:
    other = config("best", "nano", "train.seed=5", "train.stop=target", "machine.threads=1")
    assert beside_the_race(other, summary(seed=5))


@pytest.mark.parametrize(
    ("ran", "came_to"),
    [
        (config("best", "nano", "model.softcap=30.0"), {}),
        (config("best", "nano", "train.target=4.0"), {"target": 4.0}),
        (config("best", "nano", "train.steps=20"), {}),
        (config("record-16"), {}),
        (config("baseline"), {}),
        (config("best", "small"), {}),
        (config().model_copy(update={"recipe": "mine"}), {}),
        (config(), {"dataset_fingerprint": "f" * 64}),
        (config(), {"reached_target": False, "tokens_to_target": None}),
    ],
)
def test_nothing_is_said_of_what_was_not_raced(ran: Config, came_to: dict[str, Any]) -> None:
    assert beside_the_race(ran, summary(**came_to)) == ""
