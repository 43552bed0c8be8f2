"""Is it the same experiment? What is raced against what it runs on, told apart in one place.

An experiment is every value of a config but for the names of the files it came from (`recipe`,
`track`), the machine, and the folder of the dataset: where data lies is not what it holds, which
fingerprints of datasets compare. Resuming, reusing the runs of a race, the leaderboard, published
curves and the page's groups all ask here; what each of them may vary besides, such as the seed, it
names in `but`, as keys or whole sections.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Any, NamedTuple

from speedrun.config.code import code_tables
from speedrun.config.files import flatten
from speedrun.config.schema import Config

NAMES = ("recipe", "track")
# Code is known by its hash, a dataset by its fingerprint: where they lie makes no difference.
PLACE = ("machine", "data.dir", *(f"{table}.place" for table in code_tables(Config)))
CODE_AND_DATA = tuple(key for key in PLACE if key != "machine")  # where they lie, and no more
SEED = "train.seed"
LENGTH = "train.steps"  # may change in a resumed run as long as the steps done keep their schedules
STOP = "train.stop"  # no step depends on it


class Difference(NamedTuple):
    """A key with its value in either config."""

    key: str
    one: Any
    other: Any


def all_values(config: Config, but: Collection[str] = ()) -> dict[str, Any]:
    """Every value by dotted key except names and what `but` lists."""
    left_out = {*NAMES, *but}
    return {
        key: value
        for key, value in flatten(config.model_dump(mode="json"))
        if key not in left_out and key.partition(".")[0] not in left_out
    }


def experiment(config: Config, but: Collection[str] = ()) -> dict[str, Any]:
    """The values that decide what a run results in."""
    return all_values(config, (*PLACE, *but))


def experiment_hash(config: Config, but: Collection[str] = ()) -> str:
    return hash_of(experiment(config, but))


def run_hash(config: Config) -> str:
    """SHA-256 of all values that may not change while a run is made, whoever edits its files."""
    return experiment_hash(config, but=(LENGTH, STOP))


def hash_of(values: Any) -> str:
    """SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def all_differences(one: Config, other: Config, but: Collection[str] = ()) -> list[Difference]:
    """In which values two configs differ at all, machine and folders included."""
    values, others = all_values(one, but), all_values(other, but)
    keys = [*values, *(key for key in others if key not in values)]  # code has arguments of its own
    pairs = [Difference(key, values.get(key), others.get(key)) for key in keys]
    return [pair for pair in pairs if pair.one != pair.other]


def differences(one: Config, other: Config, but: Collection[str] = ()) -> list[Difference]:
    """In which values two configs are different experiments."""
    return all_differences(one, other, (*PLACE, *but))
