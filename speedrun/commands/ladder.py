"""`speedrun ladder`: make rows of the optimizer track, print the tables, write the document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from speedrun.commands.optimizers import TRACKS, document
from speedrun.commands.rungs import (
    beaten,
    crossing_text,
    ratio_text,
    rule_text,
    seconds_text,
    state_text,
)
from speedrun.config.files import optimizers
from speedrun.errors import ConfigError
from speedrun.files import write_atomically
from speedrun.science.ladder import ladder, read_entries
from speedrun.science.rungs import Ladder, Verdicts, read_ladder
from speedrun.science.space import Budget
from speedrun.science.spread import Spread, measure_spread, pooled, read_spread
from speedrun.terminal.console import print_table

say = partial(print, flush=True)
TRIALS = 20  # in which each entry is tuned
SEEDS = 5  # of each length that counts


def ladder_command(
    *,
    recipes: Sequence[str],
    tracks: Sequence[str],
    tuned: int | None,
    retune: bool,
    seeds: int | None,
    first_seed: int | None,
    clock: int | None,
    spread: int | None,
    out: Path,
    jobs: int | None,
    write: Path | None,
) -> None:
    """Options that are None were not given; those that the rest leaves unread are refused."""
    given = {
        "--track": tracks or None, "--tuned": tuned, "--retune": retune or None, "--seeds": seeds,
        "--first-seed": first_seed, "--jobs": jobs, "--clock": clock, "--spread": spread,
    }  # fmt: skip
    if write:
        _refuse_unread("--write", "makes no runs", {"RECIPE": recipes or None, **given})
        write_document(out, write)
        return
    names, texts = recipes or optimizers(), tracks or TRACKS
    if spread is not None:
        does = "measures how far losses of other seeds lie apart, at the rates that recipes state"
        _refuse_unread("--spread", does, given, but=("--spread", "--track", "--jobs"))
        _spread(names, texts, spread, out, jobs)
        return
    if clock is not None:
        does = "measures rows that are there, one run at a time"
        _refuse_unread("--clock", does, given,
                       but=("--clock", "--track", "--seeds", "--first-seed"))  # fmt: skip
    if tuned == 0 and retune:
        raise ConfigError("--tuned 0 tunes nothing, and --retune tunes again: leave one out")
    trials = TRIALS if tuned is None else tuned
    tables = ladder(
        recipes=names, tracks=texts, tuned=Budget(trials=trials) if trials else None,
        seeds=SEEDS if seeds is None else seeds, first_seed=first_seed or 0, clock=clock or 0,
        out=out, jobs_at_once=jobs, retune=retune, say=say,
    )  # fmt: skip
    for table in tables:
        print_ladder(table)
    print(f"written to {out}; the document of it: speedrun ladder --out {out} --write FILE.md")


def _refuse_unread(
    option: str, does: str, given: Mapping[str, object], but: Sequence[str] = ()
) -> None:
    unread = [name for name, value in given.items() if value is not None and name not in but]
    if unread:
        raise ConfigError(f"{option} {does}: leave out {', '.join(unread)}")


def _spread(
    recipes: Sequence[str], tracks: Sequence[str], runs: int, out: Path, jobs: int | None
) -> None:
    entries = {name: recipe for name, (recipe, _) in read_entries(recipes, tracks).items()}
    for track in tracks:
        found = measure_spread(entries, track, runs, out, jobs, say)
        print(f"\n{track}: final losses of {found.steps} steps")
        rows = []
        for name, by_seed in found.losses.items():
            one = pooled([by_seed.values()])
            rows.append((name, len(by_seed), f"{fmean(by_seed.values()):.4f}",
                         f"{one.value:.4f}" if one else "-"))  # fmt: skip
        print_table(("entry", "runs", "mean", "spread"), rows)
        if found.sigma:
            print(f"pooled, {found.sigma.df} degrees of freedom; the track's file states it as\n"
                  f"  sigma = {found.sigma.value:.4f}")  # fmt: skip


def write_document(out: Path, path: Path) -> None:
    """The document of the tables in `out`, made of their files alone."""
    tables = read_tables(out)
    if not tables:
        raise ConfigError(f"{out} holds no ladder-*.json; make rows first: speedrun ladder")
    picture = Path("pictures") / "optimizers.svg"
    shown = picture if (path.parent / picture).exists() else None
    write_atomically(path, document(tables, read_spreads(out), shown).encode(), ConfigError)
    print(f"{path}: {', '.join(f'{len(one.rungs)} rows of {one.track}' for one in tables)}")


def read_tables(folder: Path) -> list[Ladder]:
    """The one of the text that rows were tuned on first."""
    found = [read_ladder(path) for path in folder.glob("ladder-*.json")]
    return sorted(found, key=lambda one: (not one.tuned_here, one.track))


def read_spreads(folder: Path) -> list[Spread]:
    return [read_spread(path) for path in sorted(folder.glob("spread-*.json"))]


def print_ladder(table: Ladder) -> None:
    """The rows of one text, the fewest steps first."""
    verdicts = Verdicts(table)
    print(f"\n{table.track}: steps to end below {table.target}, schedule finished; "
          f"{rule_text(table)}")  # fmt: skip
    numbers = {name: number for number, name in enumerate(verdicts.results, 1)}
    rows = []
    for name, result in verdicts.results.items():
        rung = table.rung(name)
        assert rung is not None
        rows.append((
            numbers[name], name, f"{result.steps:,}" if result.steps else result.why_not,
            crossing_text(result.crossing), ratio_text(result.crossing), state_text(rung),
            seconds_text(rung, result), beaten(result, numbers),
        ))  # fmt: skip
    print_table(("", "entry", "steps", "crossing [95% interval]", f"of {verdicts.rival}'s", "state",
                 "seconds", "fewer than"), rows)  # fmt: skip
    print("crossing: where the last losses of each seed cross the target, the mean over seeds; "
          "fewer than: rows that are decided to need more (Holm over all pairs, 0.05)")  # fmt: skip
