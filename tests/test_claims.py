"""docs/CLAIMS.md shows results as the commands printed them; here they are printed again.

What its other tables and README's repeat of them must be there to the digit. After new results in
docs/results or of the race in the package:  python -m tests.test_claims
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
from speedrun.commands.race import print_ablation, print_agreement, print_race
from speedrun.commands.tune import print_tuning
from speedrun.science.ablate import effects
from speedrun.science.adding import LOSS
from speedrun.science.committed import COMMITTED
from speedrun.science.compare import Entry
from speedrun.science.jobs import Job
from speedrun.science.results import Ablation, Race, Tuning, read_result
from speedrun.science.sequential import decide

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "CLAIMS.md"
README = DOCS.parent / "README.md"
# What the ladder made has a page of its own (tests/commands/test_ladder.py).
LADDER = ("ladder-", "spread-")
SHOWN = (path for path in (DOCS / "results").glob("*.json") if not path.name.startswith(LADDER))
RESULTS = [COMMITTED, *sorted(SHOWN)]


def side_by_side() -> list[tuple[Path, ...]]:
    """Ablations that the page compares, as it names them: one.json + other.json."""
    named = re.findall(r"<!-- (\S+(?: \+ \S+)+) -->", PAGE.read_text())
    return [tuple(DOCS / name for name in names.split(" + ")) for names in named]


BLOCKS = [*((path,) for path in RESULTS), *side_by_side()]


def printed(*paths: Path) -> str:
    path = paths[0]
    with redirect_stdout(io.StringIO()) as out:
        if len(paths) > 1:
            print_agreement([one for one in map(read_result, paths) if isinstance(one, Ablation)])
        elif path.name.startswith("bench"):
            print_figures(json.loads(path.read_text()))
        elif isinstance(result := read_result(path), Race):
            print_race(result)
        elif isinstance(result, Tuning):
            print_tuning(result)
        else:
            print_ablation(result)
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def block_of(*paths: Path) -> re.Pattern[str]:
    place = " + ".join(os.path.relpath(path, DOCS) for path in paths)
    before = rf"<!-- {re.escape(place)} -->\n```\n"
    return re.compile(rf"(?<={before}).*?(?=\n```)", re.DOTALL)


@pytest.mark.parametrize("paths", BLOCKS, ids=lambda paths: "+".join(one.stem for one in paths))
def test_the_page_shows_the_results(paths: tuple[Path, ...]) -> None:
    shown = block_of(*paths).search(PAGE.read_text())
    assert shown is not None, f"CLAIMS.md has no block for {paths[0].name}"
    assert shown.group() == printed(*paths)


def test_other_pages_quote_whole_lines_of_results() -> None:
    quotes = [
        (DOCS / name, block)
        for page in DOCS.glob("*.md")
        if page != PAGE
        for name, block in re.findall(
            r"<!-- (\S+\.json) -->\n```\n(.*?)\n```", page.read_text(), re.S
        )
    ]
    assert quotes
    for path, block in quotes:
        assert set(block.splitlines()) <= set(printed(path).splitlines())


def test_effects_and_ratios_in_the_text_are_those_of_the_results() -> None:
    """Each number with its interval, wherever the page repeats one."""
    text = PAGE.read_text()
    for paths in BLOCKS:
        text = block_of(*paths).sub("", text)
    quoted = re.findall(r"[+-]?\d+\.\d+ \[[+-]?\d+\.\d+, [+-]?\d+\.\d+\]", text)
    assert quoted
    results = "\n".join(printed(path) for path in RESULTS)
    assert [one for one in quoted if one not in results] == []


ABLATIONS = [path for path in RESULTS if path.name.startswith("ablation")]


@pytest.mark.parametrize("path", ABLATIONS, ids=lambda path: path.name)
def test_verdicts_follow_from_the_losses_in_the_file(path: Path) -> None:
    """Whoever doubts one has all that it was made of."""
    found = read_result(path)
    assert isinstance(found, Ablation)
    switched = {switch: by_seed(losses) for switch, losses in found.losses.items()}
    own = switched.pop(found.recipe or "")
    assert switched.keys() == {effect.switch for effect in found.effects}
    alpha, margin = found.alpha or 0, found.margin or 0
    verdicts: dict[str, tuple[str | None, int | None, float | None]]
    if found.until:
        pairs = {switch: [(runs[seed], own[seed]) for seed in runs]
                 for switch, runs in switched.items()}  # fmt: skip
        again = decide(
            {switch: [LOSS.of(a) - LOSS.of(b) for a, b in runs] for switch, runs in pairs.items()},
            alpha, margin,
            cells={switch: [LOSS.half_cell(a) + LOSS.half_cell(b) for a, b in runs]
                   for switch, runs in pairs.items()},
        )  # fmt: skip
        verdicts = {switch: (one.verdict, one.n, one.mean) for switch, one in again.items()}
    else:
        families = {switch: [*runs.values()] for switch, runs in switched.items()}
        rows = effects(families, [*own.values()], alpha, margin, ["val_loss"])
        verdicts = {row.switch: (row.verdict, row.n, row.effect) for row in rows}
    for effect in found.effects:
        if effect.metric == "val_loss":
            verdict, n, mean = verdicts[effect.switch]
            assert (effect.verdict, effect.n) == (verdict, n)
            assert effect.effect == pytest.approx(mean)


def by_seed(losses: dict[int, float | None]) -> dict[int, Entry]:
    return {seed: Entry(recipe="", seed=seed, val_loss=loss) for seed, loss in losses.items()}


def readme_rows() -> dict[str, str]:
    """README's table of the race, by recipe: what stands behind its description."""
    race = read_result(COMMITTED)
    assert isinstance(race, Race)
    rows = {}
    for recipe, table in race.statistics().items():
        row = table["tokens_to_target"]
        assert row.mean is not None, f"{recipe} has no figure in the race"
        ratio = f"{row.ratio:.2f} [{row.ratio_low:.2f}, {row.ratio_high:.2f}]"
        shown = "1" if recipe == race.order[0] else ratio
        rows[recipe.removesuffix("-tuned")] = f"{row.mean / 1e6:.2f} M | {shown}"
    return rows


def row_of(recipe: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=^\| `{recipe}`)(: [^|]*) \| (.*) \|$", re.MULTILINE)


@pytest.mark.parametrize(("recipe", "cells"), readme_rows().items())
def test_the_table_of_the_readme_is_that_of_the_race(recipe: str, cells: str) -> None:
    shown = row_of(recipe).search(README.read_text())
    assert shown is not None, f"README has no row for {recipe}"
    assert shown[2] == cells


def test_what_the_readme_says_of_muon_is_what_the_race_found() -> None:
    text = " ".join(README.read_text().split())
    for path, recipe, words in (
        (COMMITTED, "record-03-tuned", "record 3 takes {} of record 2's"),
        (DOCS / "results" / "race-muon-18.json", "record-18-tuned", "record 18 {} of its own with"),
        (DOCS / "results" / "race-muon-nano.json", "record-18-tuned", "twice as wide, it takes {}"),
    ):
        race = read_result(path)
        assert isinstance(race, Race)
        muon = race.to_the_one_before()[recipe]
        ratio = f"{muon.ratio:.2f} [{muon.ratio_low:.2f}, {muon.ratio_high:.2f}]"
        assert words.format(ratio) in text


@pytest.mark.parametrize(
    ("words", "figures"),
    [
        (r"the nano step takes (\S+) times AdamW's", ["{muon_step_over_adamw_step:.3f}"]),
        (r"record 13 takes (\S+) times the time", ["{token_mask_over_block_mask:.2f}"]),
        (r"mixed rule of record 15 (\S+) times", ["{mixed_mask_over_block_mask:.2f}"]),
        (r"blocking gather takes (\S+) times", ["{blocking_gather_over_async:.2f}"]),
        (r"made ahead takes (\S+) of .*? in the step (\S+?)[;|]",
         ["{waiting_for_batches_made_ahead:.4%}", "{making_batches_in_the_step:.2%}"]),
        (r"(\S+) against (\S+) MiB", ["{muon_state_mib:.0f}", "{adamw_state_mib:.0f}"]),
        (r"(\S+) less; half", ["{less_state:.0%}"]),
    ],
)  # fmt: skip
def test_figures_of_the_bench_in_the_tables_are_those_of_its_file(
    words: str, figures: list[str]
) -> None:
    bench = json.loads((DOCS / "results" / "bench-claims.json").read_text())
    for kind in ("muon", "adamw"):
        bench[f"{kind}_state_mib"] = bench[f"{kind}_state_bytes"] / 2**20
    bench["less_state"] = 1 - bench["state_ratio"]
    wanted = [figure.format(**bench) for figure in figures]
    shown = [list(found.groups()) for found in re.finditer(words, PAGE.read_text())]
    assert shown == [wanted] * max(len(shown), 1)


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

    def plan_only(_: object, jobs: list[Job], *__: object) -> None:
        planned.extend(jobs)
        raise PlannedError

    (tmp_path / "docs").symlink_to(DOCS)  # a recipe is there
    monkeypatch.chdir(tmp_path)
    for module in ("jobs", "tune"):
        monkeypatch.setattr(f"speedrun.science.{module}.find_dataset", lambda _: tiny_dataset)
    monkeypatch.setattr("speedrun.science.jobs.RunSet.run_until", plan_only)
    _, verb, *words = shlex.split(command)
    if verb == "bench":
        assert words[0] in BENCHES
        return
    with pytest.raises(PlannedError):
        CliRunner().invoke(app, [verb, *words], catch_exceptions=False)
    assert len({(job.label, job.seed) for job in planned}) == len(planned) > 1


if __name__ == "__main__":
    text = PAGE.read_text()
    for block in BLOCKS:
        shown = printed(*block)
        text = block_of(*block).sub(lambda _, shown=shown: shown, text)  # type: ignore[misc]
    PAGE.write_text(text)
    readme = README.read_text()
    for recipe, cells in readme_rows().items():
        readme = row_of(recipe).sub(rf"\1 | {cells} |", readme)
    README.write_text(readme)
