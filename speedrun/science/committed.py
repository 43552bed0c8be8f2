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

COMMITTED = Path(__file__).parent / "race.json"


def committed_race() -> Race:
    race = read_result(COMMITTED)
    assert isinstance(race, Race)
    return race


def raced_as(recipe: str, race: Race) -> str | None:
    """The name a recipe has in a race: its own, or that of the file with its tuned rates."""
    return next((name for name in (recipe, f"{recipe}-tuned") if name in race.order), None)


def beside_the_race(config: Config) -> str:
    """What the run's recipe and the first one of the race took to its target, and their ratio.

    The race is on a track of its own, which is named: it is a fact about the recipe and not about
    this run. Nothing for a recipe that was not raced, and for a run with other settings than those
    of its recipe and track.
    """
    race = committed_race()
    baseline, own = race.order[0], raced_as(config.recipe, race)
    if own in (None, baseline) or not _as_its_files_say(config):
        return ""
    assert own is not None
    rows = statistics((own, baseline), race.entries)
    ours, theirs = (rows[recipe]["tokens_to_target"] for recipe in (own, baseline))
    if theirs.ratio is None or theirs.ratio_low is None or theirs.ratio_high is None:
        return ""
    tuned = ", rates tuned" if race.tuned else ""
    return (
        f"on {race.track} {config.recipe} takes {ours.mean:,.0f} tokens to {race.target}, the "
        f"GPT-2 {baseline.removesuffix('-tuned')} {theirs.mean:,.0f}: {theirs.ratio:.1f} times as "
        f"many [{theirs.ratio_low:.1f}, {theirs.ratio_high:.1f}] "
        f"({'schedules finished' if race.finished else 'in mid-schedule'}{tuned})"
    )


def _as_its_files_say(config: Config) -> bool:
    """The run is what its recipe and track make of it, as the runs of the race were."""
    try:
        plain = resolve(config.recipe, config.track).config
    except ConfigError:  # they are the user's own files, somewhere else
        return False
    return not differences(config, plain, but=(SEED, "train.stop"))
