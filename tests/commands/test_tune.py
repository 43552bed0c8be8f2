"""`speedrun tune`: what it is asked for, what it prints, and that it writes a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from speedrun.cli import app
from speedrun.commands import tune as command
from speedrun.science.results import Tuning
from speedrun.science.space import Budget
from tests.report.made import HEAD, made_tuning

FOUND = made_tuning()


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    command.print_tuning(FOUND)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == (
        "modern on nano: final loss of 4 trials, seeds 1000 to 1001, validation on the rows "
        "between those a race is judged by"
    )
    assert lines[2:7] == [
        "trial optimizer.head.lr loss",
        "2 0.0989 3.8500 (3.8000 to 3.9000)",
        "1 0.02 3.9500 (3.9000 to 4.0000)",
        "0 0.008 4.1000 (4.0000 to 4.2000) as it stands",
        "3 0.05 diverged",
    ]
    assert lines[8:] == [
        "best: trial 2, optimizer.head.lr=0.0989: 3.8500, 0.2500 below modern as it stands "
        "(4.1000), on seeds 1000 to 1001 and rows that no race uses",
        "the lowest of 4 losses flatters itself: part of the gain is luck",
        "the best value of optimizer.head.lr is at the edge of the range 0.001..0.1: widen it",
        "1 of 4 trials diverged",
    ]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def fake(**request: Any) -> Tuning:
        asked.append(request)
        FOUND.write(request["out"] / "tune.json")
        return FOUND

    monkeypatch.setattr(command, "tune", fake)
    words = [
        "tune",
        "modern",
        "--budget",
        "4",
        "--out",
        str(tmp_path),
        "--set",
        "model.softcap=15.0",
    ]
    done = CliRunner().invoke(app, [*words, "--over", str(HEAD), "--seeds", "2", "--jobs", "1"])
    assert done.exit_code == 0, done.output
    assert asked[0]["over"] == [HEAD]
    assert asked[0]["budget"] == Budget(trials=4)
    assert (asked[0]["seeds"], asked[0]["jobs_at_once"], asked[0]["track"]) == (2, 1, "nano")
    assert (tmp_path / "tune.html").read_text().startswith("<!doctype html>")
    race = (
        f"speedrun race modern {tmp_path}/modern-tuned.toml --track nano --set model.softcap=15.0"
    )
    assert race in done.output
    assert CliRunner().invoke(app, words).exit_code == 0
    assert [one.key for one in asked[1]["over"]] == ["optimizer.hidden.lr", "optimizer.head.lr"]
    written = json.loads((tmp_path / "tune.json").read_text())
    assert written["kind"] == "tuning"
    assert {"over", "budget", "seeds", "rows", "trials", "command"} <= written.keys()
    assert "Example:  speedrun tune" in CliRunner().invoke(app, ["tune", "--help"]).output
