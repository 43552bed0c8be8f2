"""`speedrun recipes` and `speedrun tracks`: what is listed, shown, traced and compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from speedrun.commands.files import diff_files, list_files, show_file, show_history
from speedrun.config.files import built_in


def test_every_recipe_and_track_is_listed_with_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for kind in ("recipe", "track"):
        list_files(kind)
        lines = filter(None, capsys.readouterr().out.splitlines()[1:])
        listed = [line.split()[0] for line in lines]
        assert [name for name in built_in(kind) if name not in listed] == []


def test_show_names_the_file_that_set_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    show_file("recipe", "record-18")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["model.softcap", "15.0", "recipe", "record-18"] in rows


def test_show_says_what_a_track_fixes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_file("track", "optimizer")
    text = capsys.readouterr().out
    assert "\nfixed: model, attention," in text
    assert "\nfree: optimizer, schedule," in text
    assert re.search(r"\nsigma, the spread of a last loss between seeds: 0\.\d+\n", text)
    (tmp_path / "mine.toml").write_text('extends = "optimizer"\ntuned_on = "optimizer"\n')
    show_file("track", str(tmp_path / "mine.toml"))
    text = capsys.readouterr().out
    assert "rates are tuned on: optimizer" in text
    assert "sigma" not in text, "that of another track is not its own"
    show_file("track", "nano")
    assert "fixed" not in capsys.readouterr().out


def test_history_reads_as_the_records_and_names_no_document(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_history("recipe", "record-18")
    text = capsys.readouterr().out
    places = [text.index(f"\n{name}  ") for name in ("baseline", "record-03", "record-18")]
    assert places == sorted(places)
    assert "model.softcap = 30.0 -> 15.0" in text
    assert "published: " in text
    assert "seed" not in text


def test_diff_shows_both_values_or_says_that_they_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "modern"\n[model]\nsoftcap = 15.0\n')
    diff_files("recipe", "modern", str(mine))
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split() for row in rows if "softcap" in row] == [["model.softcap", "0.0", "15.0"]]
    diff_files("track", "nano", "nano")
    assert "resolve to the same values" in capsys.readouterr().out
