"""What a recipe states for a track to read it as a value: scaling backwards, on every track."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

from speedrun.config.experiment import all_values
from speedrun.config.files import names
from speedrun.config.fixed import of_track
from speedrun.config.resolve import nest, recipe_value, resolve
from speedrun.errors import ConfigError

RATES = ("optimizer.hidden.lr", "optimizer.head.lr", "optimizer.muon.lr")


@pytest.mark.parametrize("track", names("track"))
def test_every_track_reads_a_stated_value_as_it_was_found(track: str, tmp_path: Path) -> None:
    for recipe in ("modern", "muon") if of_track(track) else ("modern", "baseline", "best"):
        own = all_values(resolve(recipe, track).config)
        wanted = {key: own[key] * 1.2345 for key in RATES}
        table = {
            "extends": recipe,
            **nest({k: recipe_value(k, v, track) for k, v in wanted.items()}),
        }
        (tmp_path / "x.toml").write_text(tomli_w.dumps(table))
        read = all_values(resolve(str(tmp_path / "x.toml"), track).config)
        assert {key: read[key] for key in wanted} == pytest.approx(wanted, rel=1e-9)
        assert {key for key in own if own[key] != read[key]} == set(RATES)


def test_scaled_whole_numbers_and_powers_are_undone(tmp_path: Path) -> None:
    track = tmp_path / "track.toml"
    track.write_text(
        'extends = "nano"\n[scale]\n"optimizer.head.lr" = { factor = 0.5, power = 0.5 }\n'
        '"model.mlp_ratio" = 2.5\n'
    )
    for key, found in (("optimizer.head.lr", 0.0123), ("attention.window_end", 320),
                       ("model.value_tables", 2), ("model.bigram_rows", 777)):  # fmt: skip
        stated = recipe_value(key, found, str(track))
        assert type(stated) is type(found)
        recipe = tmp_path / "mine.toml"
        section, _, last = key.rpartition(".")
        window = '[attention]\nwindow = "tokens"\nwindow_start = 256\n'
        start = window if section == "attention" else f"{window}window_end = 2048\n[{section}]\n"
        recipe.write_text(f"{start}{last} = {stated!r}\n")
        read = all_values(resolve(str(recipe), str(track)).config)[key]
        assert read == pytest.approx(found, rel=1e-9)
    with pytest.raises(ConfigError, match=r"model.mlp_ratio = 3 cannot be stated: no whole number"):
        recipe_value("model.mlp_ratio", 3, str(track))
    with pytest.raises(ConfigError, match=r"track nano makes train.steps of schedule.steps"):
        recipe_value("train.steps", 100, "nano")
    with pytest.raises(ConfigError, match=r"track nano makes train.steps of schedule.steps"):
        recipe_value("schedule.steps", 100, "nano")
