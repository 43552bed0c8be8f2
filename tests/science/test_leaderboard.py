from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speedrun.config.resolve import resolve
from speedrun.errors import ConfigError, RunError
from speedrun.science.leaderboard import read, submit
from speedrun.train.run import RunFolder
from tests.report.made import made_summary

Make = Callable[..., list[Path]]


@pytest.fixture
def runs(tmp_path: Path) -> Make:
    """Three finished runs, with what a test changes in the last."""

    def make(losses: tuple[float, ...] = (3.9, 3.91, 3.89), *, words: tuple[str, ...] = (),
             last: tuple[str, ...] = (), summary: dict[str, Any] | None = None,
             code: str | None = "c" * 64) -> list[Path]:  # fmt: skip
        folders = []
        for seed, loss in enumerate(losses):
            final = seed == len(losses) - 1
            run = RunFolder(tmp_path / f"run{seed}")
            chosen = [*words, f"train.seed={seed}", *(last if final else ())]
            config = resolve("modern", "nano", chosen).config
            facts = {
                "seed": config.train.seed, "val_loss": loss, "steps": 100,
                "train_seconds": 60.0 + seed, **((summary or {}) if final else {}),
            }  # fmt: skip
            place = {"code_sha256": code if final else "c" * 64, "cpu": "x", "cores": 2}
            run.create(config, place)
            run.write_summary(made_summary(**facts))
            folders.append(run.path)
        return folders

    return make


def test_runs_that_keep_the_rules_make_one_entry(runs: Make, tmp_path: Path) -> None:
    board = tmp_path / "board.json"
    entry = submit(runs(), board, 0.01)
    assert (entry.n, entry.steps) == (3, 100)
    assert entry.mean == pytest.approx(3.9)
    assert entry.train_seconds == 61.0
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
        ({"code": None}, "same code", "cccccccccccc, unknown"),
        ({"words": ("train.stop=target",)}, "same step", "choose its own end"),
        ({"words": ("train.target=7.0",)}, "leaves to the track", "train.target is 7.0, not 4.3"),
        ({"words": ("validation.tokens=512",)}, "leaves to the track", "is 512, not 131072"),
        ({"words": ("machine.jobs=2",)}, "the machine to itself", "one of 2 at a time"),
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
    assert read(tmp_path / "none.json") == ()


def test_a_run_whose_place_is_not_known_is_refused(runs: Make, tmp_path: Path) -> None:
    (*_, last) = folders = runs()
    for text, sentence in [("{", "cannot be read as JSON"), ('{"cores": "two"}', "cores is 'two'")]:
        (last / "environment.json").write_text(text)
        with pytest.raises(RunError, match=rf"environment.json .*{sentence}"):
            submit(folders, tmp_path / "board.json", 0.01)
    (last / "environment.json").unlink()
    with pytest.raises(RunError, match=r"same code.* has no environment.json"):
        submit(folders, tmp_path / "board.json", 0.01)


def test_machine_settings_may_differ_within_an_entry(runs: Make, tmp_path: Path) -> None:
    last = ("machine.threads=1", "machine.microbatch=2")
    assert submit(runs(last=last), tmp_path / "board.json", 0.01).n == 3
