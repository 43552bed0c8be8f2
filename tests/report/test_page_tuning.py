"""A tuning on the page: its trials in the data, a mark each in a picture of every range."""

from __future__ import annotations

from pathlib import Path

import pytest

from speedrun.errors import ConfigError
from speedrun.report.page import build_page, page_data, read_inputs
from speedrun.science.space import Range
from tests.report.browser import Browser
from tests.report.made import HEAD, made_config, made_run, made_tuning

TABLES = Range.parse("model.value_tables=1..3")


def test_a_tuning_file_brings_its_runs_and_trials(tmp_path: Path) -> None:
    own, *others = made_tuning().trials
    trials = [own.model_copy(update={"runs": ("runs/0",)})]
    made_run(tmp_path / "runs/0", made_config("optimizer.head.lr=0.008"))
    for trial in others[:2]:
        value = trial.values[HEAD.key]
        name = f"runs/{trial.number}"
        made_run(tmp_path / name, made_config(f"optimizer.head.lr={value}"))
        trials.append(trial.model_copy(update={"runs": (name,)}))
    made_tuning(trials=tuple(trials)).write(tmp_path / "tune.json")
    inputs = read_inputs([tmp_path])
    assert [run.path.name for run in inputs.runs] == ["0", "1", "2"]
    data = page_data(inputs.runs, tuning=inputs.tuning)
    assert data["title"] == "modern tuned on nano"
    assert [group["label"] for group in data["groups"]] == ["modern", "trial 1", "trial 2"]
    shown = data["tuning"]
    assert [(one["number"], one["loss"]) for one in shown["trials"]] == [
        (0, 4.1), (1, 3.95), (2, 3.85),
    ]  # fmt: skip
    assert [one["values"] for one in shown["trials"]] == [one.values for one in trials]
    assert shown["over"] == [{"key": HEAD.key, "low": 0.001, "high": 0.1, "log": True}]
    assert (shown["best"], shown["edges"], shown["rows"]) == (2, [HEAD.key], "between")
    with pytest.raises(ConfigError, match="a second tuning"):
        read_inputs([tmp_path, tmp_path / "tune.json"])


def test_every_trial_has_a_mark_in_every_picture(browser: Browser, tmp_path: Path) -> None:
    tables = [2, 1, 3, 2]
    trials = tuple(
        trial.model_copy(update={"values": {**trial.values, TABLES.key: count}})
        for trial, count in zip(made_tuning().trials, tables, strict=True)
    )
    (tmp_path / "page.html").write_text(
        build_page([], tuning=made_tuning(trials=trials, over=(HEAD, TABLES), stopped=1))
    )
    browser.open((tmp_path / "page.html").as_uri())
    assert browser.problems() == []
    assert browser.js("document.querySelectorAll('#tuning svg').length") == 2
    assert browser.js("document.querySelectorAll('#tuning .trial').length") == 8
    text = browser.js("document.querySelector('#tuning').textContent")
    for words in ("Final loss of 4 trials, on seeds 1000 to 1001", "1 trial under way had to stop",
                  "a cross one that diverged", "at the edge of the range"):  # fmt: skip
        assert words in text
    rows = "[...document.querySelectorAll('#tuning tbody tr')]"
    assert browser.js(f"{rows}.map(r => [...r.cells].map(c => c.textContent).join(' '))") == [
        "2 0.0989 3 3.8500 −0.2500 3.8000, 3.9000 best",
        "1 0.02 1 3.9500 −0.1500 3.9000, 4.0000 ",
        "0 0.008 2 4.1000 0.0000 4.0000, 4.2000 as it stands",
        "3 0.05 2 diverged – –, 4.0000 ",
    ]
    drawn = browser.js("[...document.querySelectorAll('#tuning svg')].map(s => s.textContent)")
    assert all("as it stands" in one and "best" in one for one in drawn)
    ticks = "[...document.querySelectorAll('#tuning svg text')].map(t => t.textContent)"
    assert {"0.001", "0.01", "0.1"} <= set(browser.js(ticks))
    cards = browser.js("document.querySelector('#result').textContent")
    assert "3.8500" in cards
    assert "−0.2500" in cards
    browser.open((tmp_path / "page.html").as_uri(), width=360)
    assert browser.js("document.documentElement.scrollWidth") <= 360


def test_a_tuning_of_which_all_diverged_is_drawn(browser: Browser, tmp_path: Path) -> None:
    nothing = {"losses": (None, None), "loss": None, "diverged": True}
    trials = tuple(trial.model_copy(update=nothing) for trial in made_tuning().trials)
    page = build_page([], tuning=made_tuning(trials=trials, best=None))
    (tmp_path / "page.html").write_text(page)
    browser.open((tmp_path / "page.html").as_uri())
    assert browser.problems() == []
    assert browser.js("document.querySelectorAll('#tuning .trial').length") == 4
    assert "NaN" not in browser.js("document.querySelector('main').textContent")
