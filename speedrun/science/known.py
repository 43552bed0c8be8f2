"""Tunings that come with this package, of the recipes that are the rows of the optimizer track.

Those recipes state the values that were found, so what a user's own entry is compared with need not
be tuned on the user's machine: the budget was spent before, and its trials are in `tuned/`.
"""

from __future__ import annotations

import math
from pathlib import Path

from speedrun.config.experiment import all_values
from speedrun.config.files import optimizers
from speedrun.config.keys import whole, with_elements
from speedrun.config.schema import Config
from speedrun.science.jobs import config_of, plain_of, settings_of, track_hash
from speedrun.science.results import Tuning, read_result
from speedrun.science.space import Budget
from speedrun.science.tune import default_ranges, write_heir

FINALISTS = 4  # of every entry's trials
TUNED = Path(__file__).parent / "tuned"
ROUNDED = 1e-5  # a recipe states fewer digits


def _kept(recipe: str) -> Tuning | None:
    path = TUNED / f"{recipe}.json"
    if recipe not in optimizers() or not path.exists():
        return None
    found = read_result(path)
    assert isinstance(found, Tuning)
    return found


def as_guessed(recipe: str, track: str, folder: Path) -> str:
    """A built-in recipe with the values that its search began with, written into a folder.

    Another search begins there as well, and not around what the first one found. Any other recipe
    is what it is.
    """
    found = _kept(recipe)
    first = found.as_it_stands if found else None
    if first is None:
        return recipe
    path = folder / f"{recipe}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    why = f"{recipe} before it was tuned."
    write_heir(path, recipe, why, first.values, config_of(recipe, track, ()), track)
    return str(path)


def known_tuning(recipe: str, config: Config, track: str, budget: Budget) -> Tuning | None:
    """The search that found what a built-in recipe states; None: it would have to be made.

    It counts for what it was made of alone: the track as it is, the budget, the keys that are
    searched, and the same values of all others.
    """
    found = _kept(recipe)
    if found is None:
        return None
    asked = (track, track_hash(track), budget, FINALISTS)
    made = (found.track, found.track_hash, found.budget, found.finalists)
    if asked != made or found.best_trial is None:
        return None
    values, best = with_elements(all_values(config)), found.best_trial.values
    if {*best} != {one.key for one in default_ranges(config, track)}:
        return None
    if not all(math.isclose(values[key], best[key], rel_tol=ROUNDED) for key in best):
        return None
    # A package has another hash in its next version, and needs no other rates for that.
    versions = {f"{at}.code" for at, code in config.used_code().items() if not code.named.is_file}
    unread = config.optimizer.unread()  # as of the recipe that it extends
    plain = all_values(plain_of(track))
    now, then = (
        {
            key: value
            for key, value in with_elements({**plain, **settings}).items()
            if key not in {*best, *map(whole, best), *versions} and whole(key) not in unread
        }
        for settings in (settings_of(config, track), found.stated)
    )
    return found if now == then else None
