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
from speedrun.science.jobs import settings_of
from speedrun.science.results import Tuning, read_result
from speedrun.science.space import Budget
from speedrun.science.tune import default_ranges

TUNED = Path(__file__).parent / "tuned"
ROUNDED = 1e-5  # a recipe states fewer digits


def known_tuning(recipe: str, config: Config, track: str, budget: Budget) -> Tuning | None:
    """The search that found what a built-in recipe states; None: it would have to be made.

    It counts for what it was made of alone: this track and budget, the keys that are searched, and
    the same values of all others.
    """
    path = TUNED / f"{recipe}.json"
    if recipe not in optimizers() or not path.exists():
        return None
    found = read_result(path)
    assert isinstance(found, Tuning)
    if (found.track, found.budget) != (track, budget) or found.best_trial is None:
        return None
    values, best = with_elements(all_values(config)), found.best_trial.values
    if {*best} != {one.key for one in default_ranges(config, track)}:
        return None
    if not all(math.isclose(values[key], best[key], rel_tol=ROUNDED) for key in best):
        return None
    # A package has another hash in its next version, and needs no other rates for that.
    versions = {f"{at}.code" for at, code in config.used_code().items() if not code.named.is_file}
    unread = config.optimizer.unread()  # as of the recipe that it extends
    now, then = (
        {
            key: value
            for key, value in with_elements(settings).items()
            if key not in {*best, *map(whole, best), *versions} and whole(key) not in unread
        }
        for settings in (settings_of(config, track), found.stated)
    )
    return found if now == then else None
