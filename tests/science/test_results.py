"""race.json, ablation.json and tune.json: what is written is read back, and mistakes are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speedrun.errors import ConfigError
from speedrun.science.compare import Entry
from speedrun.science.results import Ablation, Effect, Race, read_result
from tests.report.made import made_tuning

ROOT = Path(__file__).parent.parent.parent
OTHERS = ("bench", "ladder", "spread")  # which have readers of their own
RESULTS = [
    ROOT / "speedrun/science/race.json",
    *(path for path in (ROOT / "docs/results").glob("*.json") if not path.name.startswith(OTHERS)),
]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    race = Race(track="nano", target=4.0, recipes=("a",), entries=(Entry(recipe="a", seed=0),))
    ablation = Ablation(settings={"x": ("a=1",)}, effects=(Effect(switch="x", effect=0.5),))
    for result in (race, ablation, made_tuning()):
        result.write(tmp_path / "result.json")
        assert read_result(tmp_path / "result.json") == result


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_published_result_is_written_as_it_was(path: Path, tmp_path: Path) -> None:
    race = read_result(path)
    race.write(tmp_path / path.name)
    assert json.loads((tmp_path / path.name).read_text()) == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "no list of entries, effects or trials"),
        ('{"entries": 5}', "no list of entries, effects or trials"),
        ('{"trials": []}', r"it has no 'recipe'"),
        ('{"effects": [{"switch": "x"}]}', r"effects\[0\] has no 'effect'"),
        ('{"entries": [{"recipe": "a", "seed": 0}, {"seed": 1}]}', r"entries\[1\] has no 'recipe'"),
        ('{"entries": [{"recipe": "a", "seed": "x"}]}', r"entries\[0\].seed is 'x', but"),
        ('{"entries": [5]}', r"entries\[0\] is 5, but"),
    ],
)
def test_files_refused(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        read_result(tmp_path / "x.json")


def test_a_trial_without_a_value_is_named(tmp_path: Path) -> None:
    """The page of one ended in a KeyError."""
    path = tmp_path / "tune.json"
    made_tuning().write(path)
    found = json.loads(path.read_text())
    found["trials"][1]["values"] = {}
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=r"tuning: trial 1 has no value of optimizer\.head\.lr$"):
        read_result(path)
