"""`speedrun runs`: which runs there are, and where each of them stands."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import combinations
from pathlib import Path
from typing import Any

from speedrun.errors import ConfigError, SpeedrunError, quoted, shortened
from speedrun.terminal.console import print_table
from speedrun.terminal.program import command
from speedrun.train.run import RunFolder
from speedrun.train.state import STATES, Listed, list_runs

RUNS = Path("runs")
SORTS: dict[str, Callable[[Listed], Any]] = {
    "date": lambda run: -run.date,
    "loss": lambda run: (math.inf if run.val_loss is None else run.val_loss, -run.date),
    "recipe": lambda run: (run.recipe or "~", run.track or "", run.seed or 0, -run.date),
}


def runs_command(
    folders: Sequence[Path], *, sort: str, track: str, recipe: str, state: str, as_json: bool
) -> None:
    if sort not in SORTS:
        raise ConfigError(f"--sort {quoted(sort)} cannot be used: one of {', '.join(SORTS)}")
    if state and state not in STATES:
        raise ConfigError(f"--state {quoted(state)} cannot be used: one of {', '.join(STATES)}")
    for folder in folders:
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise ConfigError(f"{shortened(folder)} {what}; name a folder of runs, such as {RUNS}")
    wanted = {"track": track, "recipe": recipe, "state": state}
    wanted = {key: value for key, value in wanted.items() if value}
    every = list_runs(folders or [RUNS])
    found = [run for run in every if all(getattr(run, key) == wanted[key] for key in wanted)]
    found.sort(key=SORTS[sort])
    if as_json:
        print(json.dumps({"runs": [{**run.as_dict(), "date": _date(run)} for run in found]}))
        return
    where = ", ".join(map(shortened, folders or [RUNS]))
    if not every:
        make = command("train", "best", "--track", "nano")
        print(f"no runs in {where}; make one: {make}")
    elif not found:
        kept = ", ".join(f"--{key} {shortened(value)}" for key, value in wanted.items())
        print(f"none of the {len(every)} runs in {where} is of {kept}; leave that out to see all")
    else:
        print_table(
            ("run", "recipe", "track", "seed", "steps", "loss", "date", "state"),
            [_row(run) for run in found],
        )
        for hint in _hints(found, sort):
            print(f"\n{hint}")


def _row(run: Listed) -> tuple[str, ...]:
    track = run.track or "-"
    done = "-" if run.steps is None else f"{run.steps:,}"
    return (
        run.path,
        f"{run.recipe or '-'} (own code)" if run.own_code else run.recipe or "-",
        f"{track} on {shortened(run.dataset)}" if run.dataset else track,
        "-" if run.seed is None else str(run.seed),
        done if run.of_steps is None else f"{done} of {run.of_steps:,}",
        _loss(run),
        _date(run)[:16].replace("T", " "),
        f"{run.state}: {run.detail}" if run.detail else run.state,
    )


def _loss(run: Listed) -> str:
    """With its step, where more steps are done."""
    if run.val_loss is None:
        return "-"
    older = run.val_step is not None and run.val_step != run.steps
    return f"{run.val_loss:.4f} at {run.val_step:,}" if older else f"{run.val_loss:.4f}"


def _date(run: Listed) -> str:
    return datetime.fromtimestamp(run.date).astimezone().isoformat(timespec="seconds")


def _how_to_go_on(run: RunFolder) -> str:
    """Here, or from the folder from which the run's paths count."""
    try:
        paths, known = run.paths_elsewhere(run.seen_from_here(run.load_config())), run.trained_on()
    except SpeedrunError:  # a record that is damaged, which who resumes is told
        paths, known = [], None
    if not paths:
        return command("train", "--resume", "--run", str(run.path))
    there = command("train", "--resume", "--run", str(run.path.resolve()))
    if known and known.begun_in:
        return f"cd {shlex.quote(known.begun_in)} && {there}"
    return f"{there}  in the folder that has {shortened(paths[0])}"


def _hints(found: Sequence[Listed], sort: str) -> list[str]:
    """What these runs can be used for next."""
    said = []
    texts = {(run.track, run.dataset) for run in found if run.val_loss is not None}
    if sort == "loss" and len(texts) > 1:
        said.append("losses on different tracks or texts do not compare; --track keeps one")
    stopped = [run for run in found if run.resumable]
    if stopped:
        said.append(f"go on:    {_how_to_go_on(RunFolder(Path(stopped[0].path)))}")
    done = [run for run in found if run.state == "finished"]
    pairs = (pair for pair in combinations(done, 2) if _worth_comparing(*pair))
    if pair := next(pairs, None):
        said.append(f"compare:  {command('compare', *(run.path for run in pair))}")
    return ["\n".join(said)] if said else []


def _worth_comparing(one: Listed, other: Listed) -> bool:
    """Two experiments on one text: two seeds of one differ by chance."""
    texts = {(run.track, run.dataset_fingerprint) for run in (one, other)}
    known = one.dataset_fingerprint is not None
    return known and len(texts) == 1 and one.experiment_sha256 != other.experiment_sha256
