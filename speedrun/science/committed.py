"""The race that comes with this package, to put a run beside.

`race.json` is the result of the command it names, as `speedrun race` wrote it; docs/CLAIMS.md shows
it whole.
"""

from __future__ import annotations

from pathlib import Path

from speedrun.config.experiment import SEED, differences
from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.errors import ConfigError
from speedrun.science.compare import statistics
from speedrun.science.results import Race, read_result
from speedrun.train.summary import Summary

COMMITTED = Path(__file__).parent / "race.json"


def committed_race() -> Race:
    race = read_result(COMMITTED)
    assert isinstance(race, Race)
    return race


def beside_the_race(config: Config, summary: Summary) -> str:
    """What the run's recipe and the first one of the race took to its target, and their ratio.

    Nothing for a run that the race says nothing about: of another recipe, track, target, dataset or
    with other settings, or one that did not reach its target.
    """
    race = committed_race()
    baseline, own = race.order[0], config.recipe
    if not summary.reached_target or own == baseline or own not in race.order:
        return ""
    raced = (race.track, race.target, race.dataset_fingerprint)
    if raced != (config.track, config.train.target, summary.dataset_fingerprint):
        return ""
    if not _as_its_files_say(config):
        return ""
    rows = statistics((own, baseline), race.entries)
    ours, theirs = (rows[recipe]["tokens_to_target"] for recipe in (own, baseline))
    if theirs.ratio is None or theirs.ratio_low is None or theirs.ratio_high is None:
        return ""
    return (
        f"{own} took {ours.mean:,.0f} tokens (mean of {ours.n} seeds), the GPT-2 {baseline} "
        f"{theirs.mean:,.0f}: {theirs.ratio:.1f} times as many "
        f"[{theirs.ratio_low:.1f}, {theirs.ratio_high:.1f}]"
    )


def _as_its_files_say(config: Config) -> bool:
    """The run is what its recipe and track make of it, as the runs of the race were."""
    try:
        plain = resolve(config.recipe, config.track).config
    except ConfigError:  # they are the user's own files, somewhere else
        return False
    return not differences(config, plain, but=(SEED, "train.stop"))
