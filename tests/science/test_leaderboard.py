from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speedrun.config.resolve import resolve, to_toml
from speedrun.errors import ConfigError, RunError
from speedrun.science.leaderboard import read, submit

Make = Callable[..., list[Path]]


@pytest.fixture
def runs(tmp_path: Path) -> Make:
    """Three finished runs, with what a test changes in the last."""

    def make(losses: tuple[float, ...] = (3.9, 3.91, 3.89), *, words: tuple[str, ...] = (),
             last: tuple[str, ...] = (), summary: dict[str, Any] | None = None,
             code: str = "c" * 64) -> list[Path]:  # fmt: skip
        folders = []
        for seed, loss in enumerate(losses):
            final = seed == len(losses) - 1
            folder = tmp_path / f"run{seed}"
            folder.mkdir(exist_ok=True)
            chosen = [*words, f"train.seed={seed}", *(last if final else ())]
            config = resolve("modern", "nano", chosen).config
            (folder / "config.toml").write_text(to_toml(config))
            facts = {
                "recipe": "modern", "track": "nano", "seed": config.train.seed,
                "val_loss": None if math.isnan(loss) else loss,
                "steps": 100, "tokens": 819200, "target": 4.3, "train_seconds": 60.0 + seed,
                "wall_seconds": 70.0, "params": 5, "stopped_early": False,
                "dataset_fingerprint": "d" * 64, **((summary or {}) if final else {}),
            }  # fmt: skip
            (folder / "summary.json").write_text(json.dumps(facts))
            place = {
                "code_sha256": code if final else "c" * 64,
                "cpu": "x",
                "gpu": None,
                "cores": 2,
            }
            (folder / "environment.json").write_text(json.dumps(place))
            folders.append(folder)
        return folders

    return make


def test_runs_that_keep_the_rules_make_one_entry(runs: Make, tmp_path: Path) -> None:
    board = tmp_path / "board.json"
    entry = submit(runs(), board, 0.01)
    assert (entry["n"], entry["mean"], entry["steps"]) == (3, pytest.approx(3.9), 100)
    assert entry["train_seconds"] == 61.0
    submit(runs(), board, 0.01)  # again: still one
    assert len(read(board)) == 1
    submit(runs(words=("model.softcap=20.0",)), board, 0.01)  # another config: another entry
    assert len(read(board)) == 2
    with pytest.raises(RunError, match="is weaker"):
        submit(runs(), board, 0.5)


@pytest.mark.parametrize(
    ("how", "rule", "found"),
    [
        ({"losses": (3.9, 4.3, 3.9)}, "at or below the target at p < 0.01", "p 0."),
        ({"losses": (3.9,)}, "at p < 0.01", "p undefined"),
        ({"last": ("model.softcap=15.0",)}, "same config", "model.softcap is 15.0"),
        ({"last": ("train.seed=0",)}, "no two runs share a seed", "0, 1, 0"),
        ({"summary": {"dataset_fingerprint": "e" * 64}}, "same dataset", "dddddddddddd"),
        ({"summary": {"steps": 90}}, "same step", "90, 100"),
        ({"summary": {"stopped_early": True}}, "same step", "stopped before its end"),
        ({"code": "f" * 64}, "same code", "ffffffffffff"),
        ({"words": ("train.stop=target",)}, "same step", "choose its own end"),
        ({"words": ("train.target=7.0",)}, "leaves to the track", "train.target is 7.0, not 4.3"),
        ({"words": ("validation.tokens=512",)}, "leaves to the track", "is 512, not 32768"),
        ({"losses": (3.9, float("nan"), 3.9)}, "at p < 0.01", "p undefined"),
    ],
)
def test_a_broken_rule_is_quoted(
    runs: Make, tmp_path: Path, how: dict[str, Any], rule: str, found: str
) -> None:
    board = tmp_path / "board.json"
    with pytest.raises(RunError) as caught:
        submit(runs(**how), board, 0.01)
    assert rule in str(caught.value)
    assert found in str(caught.value)
    assert not board.exists()


def test_a_file_that_is_no_leaderboard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a leaderboard"):
        read(tmp_path / "x.json")
    assert read(tmp_path / "none.json") == []
