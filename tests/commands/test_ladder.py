"""The table of the optimizer track: verdicts and document follow from the losses in its files.

After new results in docs/results:  speedrun ladder --out docs/results --write docs/OPTIMIZERS.md
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from speedrun.commands.ladder import (
    ladder_command,
    print_ladder,
    read_spreads,
    read_tables,
    write_document,
)
from speedrun.commands.optimizers import TRACKS, document, profile
from speedrun.commands.rungs import beaten
from speedrun.config.files import optimizers
from speedrun.errors import ConfigError, SpeedrunError
from speedrun.science.climb import other_tuning
from speedrun.science.compare import Row
from speedrun.science.rule import Z
from speedrun.science.rungs import (
    Ladder,
    Result,
    Rung,
    Timed,
    Tuned,
    Verdicts,
    file_of,
    read_ladder,
)
from speedrun.science.spread import read_spread, stated_sigma

DOCS = Path(__file__).parents[2] / "docs"
FILES = sorted((DOCS / "results").glob("ladder-*.json"))
SPREADS = sorted((DOCS / "results").glob("spread-*.json"))
PICTURE = Path("pictures/optimizers.svg")


def made(name: str, crossing: float, track: str = "optimizer", seeds: int = 5) -> Rung:
    """An entry whose loss falls by half a nat for e times the steps; seeds differ by 0.01 nats."""
    losses: dict[int, dict[int, float | None]] = {}
    for place in range(-40, 41):
        steps = round(400 * 1.03**place)
        if 0.85 < steps / crossing < 1.2:
            mean = 3.5 - 0.5 * math.log(steps / crossing)
            losses[steps] = {
                seed: mean + 0.01 * ((seed + place * len(name)) % seeds - 2) / 1.5
                for seed in range(seeds)
            }
    return Rung(
        recipe=name, why=f"{name} | made up", optimizer=name, packages={"x": "x-optim 1.2"},
        tuned=Tuned(track="optimizer", budget="12 trials", trials=12, loss=3.4, before=3.5,
                    values={"optimizer.hidden.lr": 0.01}, edges=("optimizer.hidden.lr",)),
        code_sha256="c" * 64, machine={"cpu": "a CPU", "cores": 2}, losses=losses,
        state_bytes=2**20,
        timed=(Timed(seed=0, steps=0, seconds=9.0),),
    )  # fmt: skip


def table(track: str = "optimizer", **crossings: float) -> Ladder:
    return Ladder(
        track=track, target=3.5, sigma=0.01, own_steps=400, seeds=tuple(range(5)),
        dataset_fingerprint="f" * 64,
        clock={"cpu": "another CPU"}, commands=("speedrun ladder",),
        rungs=tuple(made(name, crossing) for name, crossing in crossings.items()),
    )  # fmt: skip


def test_results_follow_from_the_losses() -> None:
    verdicts = Verdicts(table(adamw=400.0, muon=300.0, lion=302.0))
    assert [*verdicts.results] == ["muon", "lion", "adamw"]
    for name, crossing in (("adamw", 400.0), ("muon", 300.0)):
        result = verdicts.results[name]
        assert result.crossing.mean == pytest.approx(crossing, rel=0.01)
        # The mean must lie 3.09 standard errors below the target: so many steps more, to the grid.
        margin = Z * 0.01 / math.sqrt(5)
        assert result.steps is not None
        assert 1 <= result.steps / (crossing * math.exp(margin / 0.5)) < 1.03 * 1.005
    assert verdicts.results["muon"].fewer_than == ("adamw",)
    assert verdicts.results["lion"].fewer_than == ("adamw",)
    assert verdicts.results["adamw"].crossing.ratio == 1.0
    assert verdicts.results["muon"].crossing.ratio == pytest.approx(0.75, rel=0.01)


def test_an_entry_without_a_figure_says_why() -> None:
    one = table(adamw=400.0, never=2000.0)
    high: dict[int, dict[int, float | None]] = {1558: {0: 3.7, 1: None}}
    one = one.with_rung(one.rungs[1].model_copy(update={"losses": high}))
    result = Verdicts(one).results["never"]
    assert (result.steps, result.crossing.mean) == (None, None)
    assert "ends above the target with 1558 steps" in result.why_not
    assert [*Verdicts(one).results] == ["adamw", "never"]
    assert "ends above the target" in document([one], [], None)


def test_an_entry_whose_crossing_is_unknown_says_why() -> None:
    one = table(adamw=400.0, muon=300.0)
    row, steps = one.rungs[1], Verdicts(one).results["muon"].steps
    assert steps
    shorter = max(length for length in row.losses if length < steps)
    losses = row.losses | {shorter: row.losses[shorter] | {4: None}}
    result = Verdicts(one.with_rung(row.model_copy(update={"losses": losses}))).results["muon"]
    assert result.steps == steps
    assert result.crossing.mean is None
    assert result.why_not == f"a run diverged with {shorter} steps"


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    one = table(adamw=400.0, muon=300.0)
    one.write(file_of("somewhere/optimizer.toml", tmp_path))
    assert read_tables(tmp_path) == [one]
    one.with_rung(made("muon", 280.0)).write(file_of("optimizer", tmp_path))
    assert [rung.recipe for rung in read_tables(tmp_path)[0].rungs] == ["adamw", "muon"]


@pytest.mark.parametrize(
    ("key", "value"), [("grid", 1.0), ("own_steps", 0), ("seeds", []), ("rungs", [{}])]
)
def test_a_damaged_file_is_refused_in_a_sentence(key: str, value: object, tmp_path: Path) -> None:
    file = tmp_path / "ladder-optimizer.json"
    table(adamw=400.0).write(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match=f"is not a table of optimizers: .*{key}"):
        read_tables(tmp_path)


def test_the_profile_counts_cases_within_a_factor_of_the_best() -> None:
    """Seeds of a made-up entry differ alike in all, so a text has one factor for all its seeds."""
    tables = [table(adamw=400.0, muon=300.0), table("optimizer-prose", adamw=400.0, muon=420.0)]
    found = profile([*map(Verdicts, tables)])
    assert [*found] == ["muon", "adamw"]
    factors, shares = zip(*found["adamw"], strict=True)
    assert shares == pytest.approx([n / 10 for n in range(1, 11)])
    assert factors[:5] == pytest.approx([1.0] * 5, abs=0.02)
    assert factors[5:] == pytest.approx([400 / 300] * 5, rel=0.05)
    assert [factor for factor, _ in found["muon"]][5:] == pytest.approx([1.05] * 5, rel=0.03)


def test_a_page_says_which_rows_it_lacks() -> None:
    names = optimizers()
    code = table("optimizer", **dict.fromkeys(names[1:], 400.0))
    text = " ".join(document([code], [], None).split())
    assert f"not made yet: `{names[0]}` on `optimizer`; every entry on `optimizer-prose`." in text
    every = [table(track, **dict.fromkeys(names, 400.0)) for track in TRACKS]
    assert "not made yet" not in document(every, [], None)
    assert "not made yet" not in document([table("mine", adamw=400.0)], [], None), "one's own track"


def test_rows_that_are_beaten_are_named_in_short() -> None:
    numbers = {name: number for number, name in enumerate("abcdefg", 1)}
    result = Result(steps=1, crossing=Row(0, 0), fewer_than=("g", "c", "d", "e"))
    assert beaten(result, numbers) == "3-5, 7"


def test_the_document_is_made_of_the_files_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(adamw=400.0, muon=300.0).write(tmp_path / "ladder-optimizer.json")
    held_out = table("optimizer-prose", adamw=400.0, muon=300.0)
    held_out.write(tmp_path / "ladder-optimizer-prose.json")
    assert [one.track for one in read_tables(tmp_path)] == ["optimizer", "optimizer-prose"]
    page = tmp_path / "page.md"
    write_document(tmp_path, page)
    text = page.read_text()
    assert "| 1 | `muon` | **3" in text
    assert "made up" in text
    assert "as the track states it." in text, "where no spread is there"
    assert "tuned in 12 trials, on optimizer; optimizer-prose is held out." in text
    assert "x-optim 1.2" in text
    assert "svg" not in text, "there is no picture beside it"
    assert max(map(len, (line for line in text.splitlines() if "|" not in line))) <= 120
    print_ladder(read_tables(tmp_path)[0])
    assert "muon" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"no ladder-.*; make rows first"):
        write_document(tmp_path / "nowhere", page)


def test_the_page_of_the_documents_is_that_of_the_results() -> None:
    results = DOCS / "results"
    made = document(read_tables(results), read_spreads(results), PICTURE)
    assert (DOCS / "OPTIMIZERS.md").read_text() == made


@pytest.mark.parametrize("path", [*FILES, *SPREADS], ids=lambda path: path.name)
def test_a_file_of_the_documents_is_written_as_it_was(path: Path, tmp_path: Path) -> None:
    found = read_ladder(path) if path in FILES else read_spread(path)
    found.write(tmp_path / path.name)
    assert json.loads((tmp_path / path.name).read_text()) == json.loads(path.read_text())


def test_a_track_states_what_was_measured_on_it() -> None:
    for path in SPREADS:
        found = read_spread(path)
        assert found.sigma is not None
        assert f"{found.sigma.value:.4f}" == f"{stated_sigma(found.track):.4f}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_verdicts_in_a_file_follow_from_its_losses(path: Path) -> None:
    """By hand, from the numbers alone: whoever doubts a row can do the same."""
    stored, found = json.loads(path.read_text()), read_ladder(path)
    verdicts = stored["verdicts"]
    for rung in found.rungs:
        whole = {steps: [*by_seed.values()] for steps, by_seed in sorted(rung.losses.items())
                 if len(by_seed) == len(found.seeds)}  # fmt: skip
        passing = {}
        for steps, losses in whole.items():
            known = [loss for loss in losses if loss is not None]
            below = (found.target - fmean(known)) * math.sqrt(len(known)) if known else -1.0
            passing[steps] = len(known) == len(losses) and below >= 3.09 * found.sigma
        # The shortest that passes while the next shorter one of the grid does not.
        by_hand = [steps for before, steps in pairwise(passing)
                   if passing[steps] and not passing[before]
                   and steps / before < found.grid**1.5]  # fmt: skip
        assert verdicts["steps"][rung.recipe] == (by_hand[0] if by_hand else None), rung.recipe
    assert verdicts == json.loads(json.dumps(Verdicts(found).as_dict()))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"recipes": ["best"]}, r"fixes model.heads at 2"),
        ({"recipes": ["adamw"], "tracks": ["nano"]}, "track 'nano' fixes nothing"),
        (
            {"recipes": ["adamw", "optimizer.head.lr=1"]},
            "'optimizer.head.lr=1' is no recipe: an ent",
        ),
        ({"recipes": ["adamw", "adamw"]}, "two entries are called 'adamw'"),
        ({"recipes": ["adamw"], "first_seed": 990, "seeds": 20}, "--first-seed 990 cannot be used"),
    ],
)
def test_what_cannot_be_raced_is_refused_before_any_run(
    words: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        call(out=tmp_path, **words)
    assert not [*tmp_path.iterdir()]


def call(**words: object) -> None:
    """The command with the options that are named here and no others."""
    unset = dict.fromkeys(("tuned", "seeds", "first_seed", "clock", "spread", "jobs", "write"))
    usual: dict[str, object] = {"recipes": [], "tracks": [], "retune": False, **unset}
    ladder_command(**{**usual, **words})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"write": Path("x.md"), "recipes": ["muon"]}, "--write makes no runs: leave out RECIPE"),
        ({"write": Path("x.md"), "seeds": 3, "clock": 1}, "leave out --seeds, --clock"),
        ({"write": Path("x.md"), "tracks": ["optimizer"]}, "leave out --track"),
        ({"clock": 3, "tuned": 12}, "--clock measures rows that are there.*leave out --tuned"),
        ({"clock": 3, "jobs": 2}, "leave out --jobs"),
        ({"spread": 9, "seeds": 3}, "--spread measures .*leave out --seeds"),
        ({"spread": 9, "retune": True}, "leave out --retune"),
        ({"spread": 2, "recipes": ["adamw"]}, "--spread 2 cannot be used: 3 runs"),
        ({"tuned": 0, "retune": True}, "--tuned 0 tunes nothing"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    words: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        call(out=tmp_path, **words)
    assert not [*tmp_path.iterdir()]


def test_an_optimizer_that_cannot_be_used_is_refused_before_any_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n")
    (tmp_path / "mine.toml").write_text(
        'extends = "adamw"\n[optimizer.hidden]\nuse = "mine.py:Mine"\nargs = { lr = 0.1 }\n'
    )
    with pytest.raises(SpeedrunError, match=r"mine\.py:Mine"):
        call(recipes=[str(tmp_path / "mine.toml")], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_packages_are_all_named_with_one_command(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.toml").write_text(
            f'extends = "adamw"\noptimizer.hidden.use = "no_such_{name}:X"\n'
        )
    recipes = [str(tmp_path / "one.toml"), "adamw", str(tmp_path / "two.toml")]
    with pytest.raises(
        ConfigError,
        match=r"one, two cannot be run without no_such_one, no_such_two: pip install "
        r"no_such_one no_such_two, or go on without: speedrun ladder adamw",
    ):
        call(recipes=recipes, out=tmp_path / "out")


def test_rows_of_a_table_are_tuned_alike() -> None:
    there = table(adamw=400, muon=340)
    alike = ("12 trials", "optimizer")
    assert not other_tuning(there, alike, ["soap"])
    for how in (("48 trials", "optimizer"), ("12 trials", "optimizer-prose"), None):
        assert other_tuning(there, how, ["soap"]) == "tuned in 12 trials on optimizer"
        assert not other_tuning(there, how, ["adamw", "muon"])  # both are made anew
    untuned = there.rungs[0].model_copy(update={"tuned": None})
    assert other_tuning(there.with_rung(untuned), alike, ["muon"]) == "not tuned"
