"""What keeps a race after a tuning fair: seeds, rows and a test of its own, and equal ranges."""

from __future__ import annotations

import struct
from functools import partial
from pathlib import Path

import pytest

from speedrun.config.experiment import all_values
from speedrun.config.resolve import resolve
from speedrun.data.build import build_dataset
from speedrun.data.dataset import Dataset
from speedrun.data.validation import choose_rows, rows_in
from speedrun.errors import ConfigError, DataError
from speedrun.report.page import page_data, read_inputs
from speedrun.science import children
from speedrun.science.jobs import config_of, plan_jobs
from speedrun.science.space import Budget
from speedrun.science.tune import default_ranges, rows_to_tune_on, tune
from speedrun.train.run import RunFolder
from tests.conftest import TINY
from tests.report.made import HEAD
from tests.train.children import QuickChild


@pytest.mark.slow
def test_a_real_tuning_leaves_seeds_rows_and_the_test_to_the_race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "Child", QuickChild)
    for index in range(60):
        lines = [f"{index} + {n} = {index + n}\n" for n in range(120)]
        (tmp_path / f"{index:02d}.txt").write_text("".join(lines))
    build_dataset([str(tmp_path / "*.txt")], tmp_path / "data", "byte", val_fraction=0.1,
                  test_fraction=0.1)  # fmt: skip
    overrides = [*TINY, f"data.dir={tmp_path / 'data'}", "train.target=5.9"]
    go = partial(tune, recipe="modern", track="nano", over=[HEAD], budget=Budget(trials=3),
                 overrides=overrides, jobs_at_once=2)  # fmt: skip
    found = go(out=tmp_path / "out", say=print)
    raced = {job.seed for job in plan_jobs({"": ("modern", overrides)}, "nano", range(100))}
    split = Dataset.open(tmp_path / "data").split("val")
    for trial in found.trials:
        (run,) = (RunFolder(tmp_path / "out" / name) for name in trial.runs)
        config = run.load_config()
        assert config.train.seed == 1000
        assert config.train.seed not in raced
        assert config.train.stop == "steps"
        last = run.read_metrics("val")[-1]
        assert (last["step"], last["loss"]) == (8, trial.loss)  # the schedule is finished
        rows = rows_in(split, config.batch.length), config.validation.tokens // config.batch.length
        judged = choose_rows(*rows, resolve("modern", "nano").config.validation.rows)
        assert not set(choose_rows(*rows, config.validation.rows)) & set(judged)
        for key, value in trial.values.items():
            assert all_values(config)[key] == value
    assert len({trial.loss for trial in found.trials}) == 3
    # Nothing is repeated, and of the test nothing is read: not even whether it is there.
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("summary.json")}
    for shard in Dataset.open(tmp_path / "data").split("test").paths:
        shard.write_bytes(b"poison")
    said: list[str] = []
    assert go(out=tmp_path / "out", say=said.append).trials == found.trials
    assert stamps == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("summary.json")}
    assert sum("found finished" in line for line in said) == 3
    for shard in Dataset.open(tmp_path / "data").split("test").paths:
        shard.unlink()
    poisoned = go(out=tmp_path / "again", say=print)
    assert [trial.losses for trial in poisoned.trials] == [trial.losses for trial in found.trials]
    # The page has them all.
    inputs = read_inputs([tmp_path / "out"])
    data = page_data(inputs.runs, inputs.race, inputs.ablation, inputs.tuning)
    assert [trial["loss"] for trial in data["tuning"]["trials"]] == [
        trial.loss for trial in found.trials
    ]
    assert [group["label"] for group in data["groups"]] == ["modern", "trial 1", "trial 2"]
    assert data["title"] == "modern tuned on nano"


def test_rows_that_are_left_to_tune_on(tiny_dataset: Path, tmp_path: Path) -> None:
    def rows(*words: str, data: Path = tiny_dataset) -> str:
        return rows_to_tune_on(
            resolve("modern", "nano", [*TINY, f"data.dir={data}", *words]).config
        )

    assert rows() == "between"
    assert rows("validation.rows=first") == "last"
    assert rows("validation.rows=last") == "first"
    assert rows("validation.rows=between") == "spread"
    whole = rows_in(Dataset.open(tiny_dataset).split("val"), 64)
    with pytest.raises(DataError, match="leaves too few to tune on"):
        rows(f"validation.tokens={64 * whole}")
    with pytest.raises(DataError, match="leaves too few to tune on"):
        rows(f"validation.tokens={64 * (whole // 2 + 1)}", "validation.rows=first")
    # The last rows of public shards are the test: see train/evaluate.py.
    public = tmp_path / "public"
    public.mkdir()
    for split in ("train", "val"):
        with (public / f"x_{split}_000000.bin").open("wb") as file:
            file.write(struct.pack("<3i", 20240520, 1, 10_000))
            file.truncate(1024 + 20_000)
    assert rows(data=public) == "between"
    with pytest.raises(ConfigError, match="the last are the test, so none are left"):
        rows("validation.rows=first", data=public)


def test_a_validation_that_is_shrunk_leaves_rows_to_tune_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{n} and {n} are {n + n}\n" for n in range(400)))
    build_dataset([str(tmp_path / "a.txt")], tmp_path / "mine", "byte")
    available = Dataset.open(tmp_path / "mine").split("val")
    for judged in ("spread", "first"):
        words = [f"data.dir={tmp_path / 'mine'}", f"validation.rows={judged}"]
        config = config_of("modern", "pico", words)
        assert config.validation.tokens < 65_536  # that of the track
        other = rows_to_tune_on(config)
        tuned = config_of("modern", "pico", [*words, f"validation.rows={other}"])
        rows = [
            set(choose_rows(rows_in(available, one.batch.length),
                            one.validation.tokens // one.batch.length, one.validation.rows))
            for one in (config, tuned)
        ]  # fmt: skip
        assert rows[0]
        assert rows[1]
        assert not rows[0] & rows[1]


def test_what_a_fair_tuning_searches() -> None:
    def searched(recipe: str, *words: str) -> dict[str, tuple[float, float]]:
        config = resolve(recipe, "pico", words).config
        found = default_ranges(config, "pico")
        assert all(one.log for one in found)
        values = all_values(config)
        return {one.key: (one.low / values[one.key], one.high / values[one.key]) for one in found}

    sixth, quarter = pytest.approx((1 / 6, 6), rel=1e-3), pytest.approx((1 / 4, 4), rel=1e-3)
    for recipe in ("modern", "baseline"):
        assert searched(recipe) == {"optimizer.hidden.lr": sixth, "optimizer.head.lr": quarter}
    for recipe in ("record-03", "best"):
        assert searched(recipe) == {"optimizer.muon.lr": sixth, "optimizer.head.lr": quarter}
    words = ("optimizer.kind=adamw",)
    assert list(searched("best", *words)) == ["optimizer.hidden.lr", "optimizer.head.lr"]


def test_the_momentum_is_found_by_the_names_it_has(tmp_path: Path) -> None:
    def searched(recipe: str) -> list[str]:
        return [
            one.key for one in default_ranges(resolve(recipe, "optimizer").config, "optimizer")[2:]
        ]

    assert searched("modern") == ["optimizer.hidden.betas[0]"]
    assert searched("muon") == ["optimizer.muon.momentum"]
    own = tmp_path / "own.toml"
    for args, found in (
        ("lr = 0.1, betas = [0.9, 0.99]", ["betas[0]"]),
        ("lr = 0.1, momentum = 0.9, betas = [0.5, 0.9]", ["momentum"]),
        ("lr = 0.1, beta = 0.9", ["beta"]),
        ("lr = 0.1, momentum = 0.0", []),
        ("lr = 0.1, momentum = true", []),
        ("lr = 0.1", []),
    ):
        own.write_text(
            f'extends = "modern"\n[optimizer.hidden]\nuse = "a.b:C"\nargs = {{ {args} }}\n'
        )
        assert searched(str(own)) == [f"optimizer.hidden.args.{name}" for name in found]
