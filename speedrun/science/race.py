"""`speedrun race`: recipes on equal data, several seeds, to a target: how much sooner is each?

Every run ends at the first validation at or below the track's target, or at its budget of steps. A
recipe's cost is what its runs needed to reach the target; `compare.py` has the statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from speedrun.config.resolve import resolve
from speedrun.errors import ConfigError
from speedrun.science.jobs import RunSet, common_dataset, plan_jobs, refuse_own_keys, this_command
from speedrun.science.results import Race
from speedrun.science.share import share_machine


def race(
    *,
    recipes: Sequence[str],
    track: str,
    seeds: int,
    out: Path,
    say: Callable[[str], None],
    overrides: Sequence[str] = (),
    budget: int | None = None,
    jobs_at_once: int | None = None,
) -> Race:
    """Make the runs that are missing and write `out/race.json`; returns what is in it.

    Without `jobs_at_once` one at a time, since seconds count, or as the race was begun.
    """
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds} cannot be used: at least 1")
    refuse_own_keys(overrides, ("train.seed", "train.stop", "machine.jobs"))
    variants: dict[str, tuple[str, Sequence[str]]] = {}
    for recipe in recipes:
        own = resolve(recipe, track, overrides).config
        if own.recipe in variants:
            raise ConfigError(f"two recipes of the race are called {own.recipe!r}; rename one")
        cut = (f"train.steps={budget}",) if budget and budget < own.steps else ()
        variants[own.recipe] = recipe, (*overrides, "train.stop=target", *cut)
    jobs = plan_jobs(variants, track, seeds)
    first = jobs[0]
    target = first.config.train.target
    if not target:
        raise ConfigError(f"track {track!r} has no target; set one, for example train.target=3.5")
    for job in jobs:
        if job.config.train.target != target:
            raise ConfigError(
                f"{first.label} has the target {target}, {job.label} {job.config.train.target}; "
                "set one for all, for example --set train.target=3.5"
            )
    fingerprint = common_dataset(jobs)
    runs = RunSet(out, fingerprint)
    jobs = share_machine(runs, jobs, jobs_at_once, otherwise=1, say=say)
    found = Race(
        track=track,
        target=target,
        seeds=seeds,
        jobs=jobs[0].config.machine.jobs,
        command=this_command(),
        dataset_fingerprint=fingerprint,
        recipes=tuple(variants),
        entries=tuple(runs.run_all(jobs, say)),
    )
    found.write(out / "race.json")
    return found
