"""`speedrun race` and `speedrun ablate`: run, print the tables, write the page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from speedrun.commands.report import report_command
from speedrun.science.ablate import ablate
from speedrun.science.compare import Row, comparable
from speedrun.science.race import race
from speedrun.science.results import Ablation, Effect, Race
from speedrun.terminal.console import print_table, size_text

say = partial(print, flush=True)
UNITS = {"tokens_to_target": "tokens", "seconds_to_target": "s", "val_loss": "nats"}


def race_command(
    *,
    recipes: Sequence[str],
    track: str,
    seeds: int,
    budget: int | None,
    out: Path,
    overrides: Sequence[str],
    jobs: int | None,
) -> None:
    found = race(recipes=recipes, track=track, seeds=seeds, budget=budget, out=out,
                 overrides=overrides, jobs_at_once=jobs, say=say)  # fmt: skip
    print_race(found)
    report_command(paths=[out], out=out / "race.html", watch=False)


def ablate_command(
    *,
    recipe: str,
    track: str,
    seeds: int,
    switches: Sequence[str],
    out: Path,
    alpha: float,
    overrides: Sequence[str],
    jobs: int | None,
) -> None:
    found = ablate(recipe=recipe, track=track, seeds=seeds, switches=switches, out=out, alpha=alpha,
                   overrides=overrides, jobs_at_once=jobs, say=say)  # fmt: skip
    print_ablation(found)
    report_command(paths=[out], out=out / "ablation.html", watch=False)


def print_race(found: Race) -> None:
    print(
        f"\nto a validation loss of {found.target} on {found.track}, {found.seeds} "
        f"seeds: mean +- standard deviation [95% interval]; ratios to {found.order[0]}"
    )
    timed = found.jobs == 1
    rows, costs = [], []
    for recipe, table in found.statistics().items():
        params = next(entry.params for entry in found.entries if entry.recipe == recipe)
        memory = table["peak_memory_bytes"].mean
        size = "-" if memory is None else size_text(memory)
        rows.append((recipe, _mean(table["tokens_to_target"], ",.0f"),
                     _ratio(table["tokens_to_target"]), _mean(table["steps_to_target"], ",.0f"),
                     _mean(table["val_loss"], ".4f")))  # fmt: skip
        times = (_mean(table["seconds_to_target"], ".1f"), _ratio(table["seconds_to_target"]),
                 _mean(table["wall_seconds_to_target"], ".1f")) if timed else ()  # fmt: skip
        costs.append((recipe, *times, _number(params, ","), size))
    print_table(("recipe", "tokens", "ratio of tokens", "steps", "last loss"), rows)
    print()
    columns = ("training seconds", "ratio of seconds", "wall seconds") if timed else ()
    print_table(("recipe", *columns, "parameters", "memory"), costs)
    if not timed:
        print(_shared(found.jobs))


def print_ablation(found: Ablation) -> None:
    print(
        f"\n{found.recipe} on {found.track}, {found.seeds} seeds: effect of each "
        "switch (switched - recipe; above 0: the technique helped)"
    )
    for metric in comparable(tuple(UNITS), found.jobs):
        form, unit = "+,.4f" if metric == "val_loss" else "+,.0f", UNITS[metric]
        rows = [
            (
                effect.switch,
                f"{_number(effect.effect, form)} {unit}{_interval(effect.low, effect.high, form)}",
                _number(effect.p, ".3g"),
                _number(effect.p_holm, ".3g"),
                "decided" if effect.decided else _undecided(effect),
            )
            for effect in found.effects
            if effect.metric == metric
        ]
        print_table((f"switch: {metric}", "effect [95% interval]", "p", "p (Holm)", ""), rows)
        print()
    if found.jobs > 1:
        print(_shared(found.jobs))


def _shared(jobs: int) -> str:
    return (f"{jobs} runs at a time shared the machine, so their seconds do not compare; --jobs 1 "
            "measures them")  # fmt: skip


def _undecided(effect: Effect) -> str:
    if effect.effect is None:
        return f"{effect.n} of {effect.of} pairs have it"
    more = effect.more_seeds
    return "undecided" if more is None else f"undecided: about {more} more seeds"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _interval(low: float | None, high: float | None, form: str) -> str:
    return "" if low is None or high is None else f" [{low:{form}}, {high:{form}}]"


def _mean(row: Row, form: str) -> str:
    if row.mean is None:
        return f"reached by {row.n} of {row.of}"
    spread = "" if row.std is None else f" +- {row.std:{form}}"
    return f"{row.mean:{form}}{spread}{_interval(row.low, row.high, form)}"


def _ratio(row: Row) -> str:
    return _number(row.ratio, ".3f") + _interval(row.ratio_low, row.ratio_high, ".3f")
