"""`speedrun tune`: search, print the trials, write the page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from speedrun.commands.report import report_command
from speedrun.config.resolve import resolve
from speedrun.science.results import Trial, Tuning
from speedrun.science.space import Budget, Range
from speedrun.science.tune import changed_nothing, default_ranges, seeds_text, tune
from speedrun.terminal.console import print_table
from speedrun.train.build import try_code

say = partial(print, flush=True)
ROWS = {
    "between": "rows between those a race is judged by",
    "last": "last rows, a race being judged by the first",
    "spread": "rows beside those a race is judged by",
    "first": "first rows, a race being judged by the last",
}


def tune_command(
    *,
    recipe: str,
    track: str,
    over: Sequence[str],
    budget: str,
    seeds: int,
    finalists: int,
    out: Path,
    overrides: Sequence[str],
    jobs: int | None,
) -> None:
    allowed = Budget.parse(budget)
    ranges = [Range.parse(text) for text in over]
    if not ranges:
        ranges = default_ranges(resolve(recipe, track, overrides).config, track)
        say("searching " + ", ".join(map(str, ranges)))
    try_code(resolve(recipe, track, overrides).config)
    found = tune(recipe=recipe, track=track, over=ranges, budget=allowed, seeds=seeds, out=out,
                 finalists=finalists, overrides=overrides, jobs_at_once=jobs,
                 say=say)  # fmt: skip
    print_tuning(found)
    print(f"recipe: {out / found.file}; to see what of it holds on other seeds and rows:")
    words = ["speedrun", "race", recipe, str(out / found.file), "--track", track]
    for override in overrides:
        words += ["--set", override]
    print(f"  {shlex.join(words)}")
    report_command(paths=[out], out=out / "tune.html", watch=False)


def print_tuning(found: Tuning) -> None:
    keys = [one.key for one in found.over]
    print(
        f"\n{found.recipe} on {found.track}: final loss of {len(found.trials)} trials, "
        f"{seeds_text(found)}, validation on the {ROWS[found.rows]}"
    )
    rows = [
        (trial.number, *(f"{trial.values[key]:g}" for key in keys), _loss(trial), _note(trial))
        for trial in found.ranked
    ]
    print_table(("trial", *keys, "loss", ""), rows)
    print()
    for sentence in sentences(found):
        print(sentence)


def sentences(found: Tuning) -> list[str]:
    """What was found, in words."""
    best, where = found.best_trial, f"on {seeds_text(found)} and rows that no race uses"
    name = f"{found.recipe} as it stands"
    said = []
    if best is None:
        said.append("every trial diverged: try ranges of lower values")
    elif best.number == 0:
        said.append(f"no trial was better than {name}, {best.loss:.4f}, {where}")
    else:
        values = ", ".join(f"{key}={value:g}" for key, value in best.values.items())
        said.append(
            f"best: trial {best.number}, {values}: {best.loss:.4f}, {_gain(found, name)}, {where}"
        )
        said.append(
            f"the lowest of {len(found.trials)} losses flatters itself: part of the gain is luck"
        )
    same = changed_nothing(found)
    if same:
        keys = " and ".join(one.key for one in found.over)
        said.append(f"all {len(found.trials)} losses are the same: {keys} changed nothing here")
    for one in found.over:
        if one.key in found.edges and not same:
            said.append(
                f"the best value of {one.key} is at the edge of the range {one.low:g}..{one.high:g}"
                ": widen it"
            )
    diverged = sum(trial.diverged for trial in found.trials)
    if diverged and best is not None:
        said.append(f"{diverged} of {len(found.trials)} trials diverged")
    if found.stopped:
        said.append(f"trials under way when the time was over, and stopped: {found.stopped}")
    return said


def _gain(found: Tuning, name: str) -> str:
    best, own = found.best_trial, found.as_it_stands
    assert best is not None
    if own is None:
        return f"{name} did not come to its end"
    if own.loss is None or best.loss is None:
        return f"{name} diverged"
    return f"{own.loss - best.loss:.4f} below {name} ({own.loss:.4f})"


def _loss(trial: Trial) -> str:
    if trial.loss is None:
        return "diverged"
    known = [loss for loss in trial.losses if loss is not None]
    spread = f" ({min(known):.4f} to {max(known):.4f})" if len(known) > 1 else ""
    return f"{trial.loss:.4f}{spread}"


def _note(trial: Trial) -> str:
    return "as it stands" if trial.number == 0 else ""
