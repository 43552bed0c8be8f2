"""`speedrun compare`: what differs, by how much, and what must not be put side by side."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from speedrun.commands.compare import compare_command
from speedrun.config.resolve import resolve
from speedrun.errors import ConfigError
from speedrun.files import write_json
from speedrun.science.sides import Comparison, compare_runs
from speedrun.train.run import RunFolder
from speedrun.train.trained_on import TrainedOn
from tests.report.made import begun_run, made_config, made_run, made_summary

CPU = {"cpu": "a CPU", "cores": 2, "threads": 2, "libraries": {"torch": "2.13.0"}}


def run_of(
    path: Path, *overrides: str, slope: float = 0.1, place: Any = CPU, **stated: Any
) -> Path:
    """A finished run of 40 steps, with a result that agrees with its log."""
    names = {key: stated.pop(key) for key in ("recipe", "track") if key in stated}
    config = made_config(*overrides, **names)
    made_run(path, config, slope=slope, dataset=stated.get("dataset_fingerprint", "d" * 64))
    run = RunFolder(path)
    facts = {
        "recipe": config.recipe, "track": config.track, "seed": config.train.seed,
        "steps": config.steps, "tokens": config.steps * config.batch.tokens,
        "val_loss": 7.0 - slope * config.steps - 0.001 * config.train.seed,
        "target": config.train.target, "tokens_per_second": 1000.0, "train_seconds": 40.0,
        "peak_memory_bytes": 2**20,
    }  # fmt: skip
    run.write_summary(made_summary(**(facts | stated)))
    write_json(run.environment, place)
    return path


def difference(found: Comparison, metric: str) -> float | None:
    [one] = [one for one in found.results if one.metric == metric]
    assert one.differences[0] is None
    found_difference = one.differences[1]
    return None if found_difference is None else found_difference["mean"]


def test_what_differs_and_by_how_much(tmp_path: Path) -> None:
    one = run_of(tmp_path / "a", "model.softcap=30.0")
    other = run_of(
        tmp_path / "b", "model.softcap=15.0", "machine.threads=1", "train.seed=3", slope=0.09,
        tokens_per_second=500.0, params=617,
    )  # fmt: skip
    found = compare_runs([one, other])
    assert found.experiment == {"model.softcap": ("30", "15")}
    assert found.place == {"seeds": ("0", "3"), "machine.threads": ("0", "1")}
    assert difference(found, "val_loss") == pytest.approx(0.397)
    assert difference(found, "loss_at_common") == pytest.approx(0.397)
    assert difference(found, "tokens_per_second") == -500
    [params] = [one for one in found.results if one.metric == "params"]
    assert params.rows[1].ratio == 0.5
    assert found.forbidden == ()
    assert any("one seed, which proves nothing" in note for note in found.notes)
    words = shlex.split(found.command)
    assert words[:4] == ["speedrun", "ablate", "modern", "--track"]
    assert "model.softcap=15.0" in words
    assert "train.target=4.0" in words


@pytest.mark.parametrize(
    ("overrides", "stated", "word", "without"),
    [
        ([], {"dataset_fingerprint": "e" * 64}, "different texts", {"loss", "target"}),
        (["validation.tokens=512"], {}, "different rows", {"loss", "target"}),
        (["validation.rows=first"], {}, "different rows", {"loss", "target"}),
        (["train.target=5.0"], {}, "there are several (A 4, B 5)", {"target"}),
        ([], {"place": CPU | {"cpu": "another"}}, "different machines", {"time"}),
        ([], {"place": CPU | {"libraries": {"torch": "2.9.0"}}}, "different machines", {"time"}),
        ([], {"world_size": 2}, "different machines", {"time"}),
        (["machine.jobs=2"], {}, "shared the machine", {"time"}),
        ([], {"place": CPU | {"earlier": [{"cpu": "x"}]}}, "resumed on another", {"time"}),
        (["train.steps=20"], {}, "after different numbers of tokens", {"last loss"}),
    ],
)
def test_what_must_not_be_compared(
    tmp_path: Path, overrides: list[str], stated: dict[str, Any], word: str, without: set[str]
) -> None:
    one = run_of(tmp_path / "a", tokens_to_target=100, seconds_to_target=1.0)
    other = run_of(tmp_path / "b", *overrides, "model.softcap=15.0", tokens_to_target=100,
                   seconds_to_target=1.0, **stated)  # fmt: skip
    found = compare_runs([one, other])
    assert any(word in reason for reason in found.forbidden)
    metrics = {"last loss": "val_loss", "loss": "loss_at_common", "time": "tokens_per_second",
               "target": "tokens_to_target"}  # fmt: skip
    without = without | {"last loss"} if "loss" in without else without
    for kind, metric in metrics.items():
        assert (difference(found, metric) is None) == (kind in without), kind
    seconds = {"target", "time", "loss"} & without
    assert (difference(found, "seconds_to_target") is None) == bool(seconds)


def test_several_seeds_are_one_side_with_paired_intervals(tmp_path: Path) -> None:
    ours = [run_of(tmp_path / f"a{n}", f"train.seed={n}", tokens_to_target=100 + n)
            for n in range(3)]  # fmt: skip
    theirs = [
        run_of(tmp_path / f"b{n}", f"train.seed={n}", "model.softcap=9.0", slope=0.09 + n / 1000,
               tokens_to_target=200 + n)
        for n in range(3)
    ]  # fmt: skip
    found = compare_runs([*theirs, *ours])
    assert [side.seeds for side in found.sides] == [[0, 1, 2], [0, 1, 2]]
    [loss] = [one for one in found.results if one.metric == "val_loss"]
    assert loss.differences[1] is not None
    assert set(loss.differences[1]) == {"mean", "low", "high", "p"}
    [tokens] = [one for one in found.results if one.metric == "tokens_to_target"]
    assert tokens.rows[1].ratio_method == "paired"
    assert tokens.rows[1].ratio == pytest.approx(101 / 201)
    assert not any("proves nothing" in note for note in found.notes)


def test_seeds_of_one_experiment_are_sides_of_their_own(tmp_path: Path) -> None:
    paths = [run_of(tmp_path / f"a{n}", f"train.seed={n}") for n in range(3)]
    found = compare_runs(paths)
    assert [side.name for side in found.sides] == ["A", "B", "C"]
    assert any("what differs is chance" in note for note in found.notes)
    assert found.command == ""


def test_two_recipes_are_decided_by_a_race(tmp_path: Path) -> None:
    record = resolve("record-03", "nano", ["train.steps=40", "train.target=4.0"]).config
    one, other = run_of(tmp_path / "a"), RunFolder(tmp_path / "b")
    other.create(record)
    found = compare_runs([one, other.path])
    start = ["speedrun", "race", "modern", "record-03", "--track", "nano", "--seeds", "3"]
    assert shlex.split(found.command)[:8] == start
    assert "train.steps=40" in found.command
    assert any("no result yet" in note for note in found.notes)


def test_a_run_under_way_is_compared_at_equal_tokens(tmp_path: Path) -> None:
    one = run_of(tmp_path / "a")
    other = begun_run(tmp_path / "b", made_config("model.softcap=9.0"))
    other.log("start", step=0, dataset_fingerprint="d" * 64)
    other.log("val", step=10, tokens=81_920, loss=5.0)
    found = compare_runs([one, other.path])
    assert difference(found, "loss_at_common") == pytest.approx(-1.0)
    assert difference(found, "val_loss") is None


def test_terminal_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = run_of(tmp_path / "a"), run_of(tmp_path / "b", "model.softcap=15.0", slope=0.09)
    compare_command([one, other], as_json=False)
    out = capsys.readouterr().out
    for words in ("A: modern on nano, seed 0", "model.softcap", "last validation loss", "+0.4000",
                  "proves nothing", "to decide it: speedrun ablate"):  # fmt: skip
        assert words in out
    compare_command([one, other], as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["experiment"] == {"model.softcap": {"A": "0", "B": "15"}}
    assert found["results"]["val_loss"]["differences"]["B"]["mean"] == pytest.approx(0.4)
    assert found["comparable"]["time"] is True


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a"], "two run folders"),
        (["a", "a"], "given twice"),
        (["best", "a"], "it is a recipe: `speedrun recipes diff best"),
        (["nano", "a"], "it is a track"),
        (["nowhere", "a"], "`speedrun runs` lists those"),
        ([".", "a"], "is not a run folder"),
        (["file", "a"], "is a file"),
    ],
)
def test_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    begun_run(tmp_path / "a", made_config())
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=words):
        compare_runs([Path(name) for name in names])


def test_a_row_of_equal_tokens_is_named_where_there_is_one(tmp_path: Path) -> None:
    one = run_of(tmp_path / "a")
    other = run_of(tmp_path / "b", "train.steps=20", "model.softcap=15.0")
    said = "last losses: they are after different numbers of tokens"
    assert compare_runs([one, other]).forbidden == (f"{said}; those after equal ones are in the "
                                                    "table",)  # fmt: skip
    short = run_of(tmp_path / "c", "train.steps=7", "model.softcap=15.0")
    assert compare_runs([one, short]).forbidden == (said,)


def test_the_text_is_named_where_it_is_not_the_tracks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = run_of(tmp_path / "a"), run_of(tmp_path / "b", "model.softcap=15.0")
    TrainedOn(name="my poem", usual_text=False).write(RunFolder(other).dataset)
    compare_command([one, other], as_json=False)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("A: modern on nano, seed 0")
    assert second.startswith("B: modern on my poem, sized as nano, seed 0")
