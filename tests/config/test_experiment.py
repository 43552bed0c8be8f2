"""What makes two configs the same experiment."""

from __future__ import annotations

import pytest

from speedrun.config.experiment import (
    SEED,
    Difference,
    all_differences,
    differences,
    experiment,
    experiment_hash,
)
from speedrun.config.keys import CODE_TABLES, describe
from speedrun.config.resolve import resolve
from speedrun.config.schema import Config


def config(*overrides: str, recipe: str = "best") -> Config:
    return resolve(recipe, "nano", overrides).config


@pytest.mark.parametrize(
    "change",
    ["machine.threads=3", "machine.device=cpu", "machine.precision=fp32", "machine.compile=block",
     "machine.attention=dense", "machine.microbatch=2", "machine.jobs=2", "data.dir=/elsewhere"],
)  # fmt: skip
def test_what_it_runs_on_does_not_make_it_another_experiment(change: str) -> None:
    one, other = config(), config(change)
    assert differences(one, other) == []
    assert experiment_hash(one) == experiment_hash(other)
    assert [key for key, *_ in all_differences(one, other)] == [change.partition("=")[0]]


def test_names_of_files_do_not_count() -> None:
    one = config(recipe="modern")
    assert differences(one, one.model_copy(update={"recipe": "mine", "track": "own"})) == []


@pytest.mark.parametrize("change", ["train.seed=1", "model.softcap=30.0", "train.target=4.0"])
def test_everything_else_does(change: str) -> None:
    key = change.partition("=")[0]
    one, other = config(), config(change)
    (found,) = differences(one, other)
    assert found == Difference(key, experiment(one)[key], experiment(other)[key])
    assert experiment_hash(one) != experiment_hash(other)
    assert differences(one, other, but=(key,)) == []
    assert differences(one, other, but=(key.partition(".")[0],)) == []
    assert experiment_hash(one, (key,)) == experiment_hash(other, (key,))


def test_an_experiment_is_every_key_but_names_and_place() -> None:
    words = [f"{table}.use=torch.optim:SGD" for table in CODE_TABLES]
    words += [f"{table}.args={{a = 1}}" for table in CODE_TABLES]
    values = experiment(config(*words))
    known = {f"{key}.a" if key.endswith(".args") else key for key in describe()}
    left_out = known - set(values)
    assert {key for key in left_out if not key.startswith("machine.")} == {
        "recipe", "track", "data.dir", *(f"{table}.place" for table in CODE_TABLES),
    }  # fmt: skip
    assert SEED in experiment(config())
