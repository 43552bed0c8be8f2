"""`speedrun ladder`: make rows of the optimizer track, print the tables, write the document."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from speedrun.commands.optimizers import document
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
from speedrun.science.ladder import ladder
from speedrun.science.rungs import Ladder, Verdicts, read_ladder
from speedrun.science.space import Budget
from speedrun.terminal.console import print_table

say = partial(print, flush=True)
TRACKS = ("optimizer", "optimizer-prose")


def ladder_command(
    *,
    recipes: Sequence[str],
    tracks: Sequence[str],
    tuned: int,
    seeds: int,
    first_seed: int,
    clock: int,
    out: Path,
    jobs: int | None,
    write: Path | None,
) -> None:
    if write:
        write_document(recipes, out, write)
        return
    tables = ladder(
        recipes=recipes or optimizers(), tracks=tracks or TRACKS,
        tuned=Budget(trials=tuned) if tuned else None, seeds=seeds, first_seed=first_seed,
        clock=clock, out=out, jobs_at_once=jobs, say=say,
    )  # fmt: skip
    for table in tables:
        print_ladder(table)
    print(f"written to {out}; the document of it: speedrun ladder --out {out} --write FILE.md")


def write_document(recipes: Sequence[str], out: Path, path: Path) -> None:
    """The document of the tables in `out`, made of their files alone."""
    if recipes:
        raise ConfigError(
            f"--write makes a document of what is in {out}: leave out {', '.join(recipes)}"
        )
    tables = read_tables(out)
    if not tables:
        raise ConfigError(f"{out} holds no ladder-*.json; make rows first: speedrun ladder")
    picture = Path("pictures") / "optimizers.svg"
    text = document(tables, picture if (path.parent / picture).exists() else None)
    write_atomically(path, text.encode(), ConfigError)
    print(f"{path}: {', '.join(f'{len(one.rungs)} rows of {one.track}' for one in tables)}")


def read_tables(folder: Path) -> list[Ladder]:
    return [read_ladder(path) for path in sorted(folder.glob("ladder-*.json"))]


def print_ladder(table: Ladder) -> None:
    """The rows of one text, the fewest steps first."""
    verdicts = Verdicts(table)
    print(f"\n{table.track}: steps to end below {table.target}, schedule finished; "
          f"{rule_text(verdicts.sigma, len(table.seeds))}")  # fmt: skip
    numbers = {name: number for number, name in enumerate(verdicts.results, 1)}
    rows = []
    for name, result in verdicts.results.items():
        rung = table.rung(name)
        assert rung is not None
        rows.append((
            numbers[name], name, f"{result.steps:,}" if result.steps else result.why_not or "open",
            crossing_text(result.crossing), ratio_text(result.crossing), state_text(rung),
            seconds_text(rung, result), beaten(result, numbers),
        ))  # fmt: skip
    print_table(("", "entry", "steps", "crossing [95% interval]", f"of {verdicts.rival}'s", "state",
                 "seconds", "fewer than"), rows)  # fmt: skip
    print("crossing: where each seed's last loss crosses the target, the mean over seeds; fewer "
          "than: rows that are decided to need more steps (Holm over all pairs, 0.05)")  # fmt: skip
