"""docs/CLAIMS.md shows results as the commands printed them; here they are printed again.

After new results in docs/results or of the race in the package:  python -m tests.test_claims
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from typer.testing import CliRunner

from speedrun.cli import app
from speedrun.commands.bench import BENCHES, print_figures
from speedrun.commands.race import print_ablation, print_race
from speedrun.commands.tune import print_tuning
from speedrun.science.committed import COMMITTED
from speedrun.science.jobs import Job
from speedrun.science.results import Race, Tuning, read_result

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "CLAIMS.md"
RESULTS = [COMMITTED, *sorted((DOCS / "results").glob("*.json"))]


def printed(path: Path) -> str:
    with redirect_stdout(io.StringIO()) as out:
        if path.name.startswith("bench"):
            print_figures(json.loads(path.read_text()))
        elif isinstance(result := read_result(path), Race):
            print_race(result)
        elif isinstance(result, Tuning):
            print_tuning(result)
        else:
            print_ablation(result)
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def block_of(path: Path) -> re.Pattern[str]:
    place = os.path.relpath(path, DOCS)
    before = rf"<!-- {re.escape(place)} -->\n```\n"
    return re.compile(rf"(?<={before}).*?(?=\n```)", re.DOTALL)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_the_page_shows_the_results(path: Path) -> None:
    shown = block_of(path).search(PAGE.read_text())
    assert shown is not None, f"CLAIMS.md has no block for {path.name}"
    assert shown.group() == printed(path)


def commands() -> list[str]:
    """Every command of the page; a long one goes on in the next line after a backslash."""
    text = re.sub(r"\s*\\\n\s*", " ", PAGE.read_text())
    fences = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for fence in fences for line in fence.splitlines() if line.startswith("speedrun ")]


class PlannedError(Exception):
    """The runs of a race are known, and none of them is made."""


@pytest.mark.parametrize("command", commands())
def test_the_commands_of_the_page_can_be_given(
    command: str, tmp_path: Path, tiny_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read by the command line and planned to the last run; making them takes hours."""
    planned: list[Job] = []

    def plan_only(_: object, jobs: list[Job], say: object) -> None:
        planned.extend(jobs)
        raise PlannedError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("speedrun.science.jobs.find_dataset", lambda _: tiny_dataset)
    monkeypatch.setattr("speedrun.science.jobs.RunSet.run_all", plan_only)
    _, verb, *words = shlex.split(command)
    if verb == "bench":
        assert words[0] in BENCHES
        return
    with pytest.raises(PlannedError):
        CliRunner().invoke(app, [verb, *words], catch_exceptions=False)
    assert len({(job.label, job.seed) for job in planned}) == len(planned) > 1


if __name__ == "__main__":
    text = PAGE.read_text()
    for one in RESULTS:
        shown = printed(one)
        text = block_of(one).sub(lambda _, shown=shown: shown, text)  # type: ignore[misc]
    PAGE.write_text(text)
