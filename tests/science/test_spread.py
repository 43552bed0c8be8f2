"""The spread of a track: what a file states, how it is measured, and that the two agree."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from speedrun.config.files import names
from speedrun.config.fixed import of_track
from speedrun.errors import ConfigError
from speedrun.science.spread import FIRST_SEED, pooled, read_spread, stated_sigma

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_sigma_is_pooled_around_the_mean_of_each_entry() -> None:
    rng = np.random.default_rng(0)
    cells = [rng.normal(mean, 0.3, size=n).tolist() for mean, n in ((3, 5), (9, 4), (4, 2), (1, 1))]
    squares = sum(np.var(cell, ddof=1) * (len(cell) - 1) for cell in cells if len(cell) > 1)
    found = pooled([*cells, [None, 2.0], []])
    assert found is not None
    assert found.df == 4 + 3 + 1
    assert found.value == pytest.approx(math.sqrt(squares / 8))
    assert pooled([[1.0], [None, None]]) is None


@pytest.mark.parametrize(
    "track",
    [
        name
        for name in names("track")
        if of_track(name) and (RESULTS / f"spread-{name}.json").exists()
    ],
)
def test_a_track_states_what_was_measured_on_it(track: str) -> None:
    found = read_spread(RESULTS / f"spread-{track}.json")
    assert found.sigma is not None
    assert found.sigma.df >= 60
    assert stated_sigma(track) == pytest.approx(found.sigma.value, abs=5e-5)
    seeds = [seed for by_seed in found.losses.values() for seed in by_seed]
    assert len({*seeds}) == len(seeds), "no two runs share a seed"
    assert min(seeds) >= FIRST_SEED, "and none is one that rows are judged by"


def test_a_track_without_a_spread_says_how_to_measure_it(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('extends = "optimizer"\n[data]\nsources = ["docstrings"]\n')
    with pytest.raises(ConfigError, match=r"states no sigma.*ladder adamw muon --spread 24"):
        stated_sigma(str(own))
    own.write_text('extends = "optimizer"\nsigma = 2.0\n')
    with pytest.raises(ConfigError, match=r"sigma = 2\.0"):
        stated_sigma(str(own))
    own.write_text('extends = "optimizer"\nsigma = "much"\n')
    with pytest.raises(ConfigError, match="sigma a track's number below 1"):
        stated_sigma(str(own))
