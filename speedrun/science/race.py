"""`speedrun race`: recipes on equal data, several seeds, to a target: how much sooner is each?

Every run ends at the first validation at or below the track's target, or at its budget of steps. A
recipe's cost is what its runs needed to cross the target; `compare.py` has the statistics. With
`finished` it is the shortest run that ends at the target instead, schedule and all (`finish.py`).
With `until` seeds are added one at a time until each recipe is told apart from the first, or shown
to be equal within a margin. With `tuned` every recipe's rates are searched first, for the same
budget (`tune.py`).

At the end the last weights of every run are evaluated on the test split, once, so that the losses
they were chosen by stand beside losses on text that nobody looked at.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from speedrun.config.schema import Config
from speedrun.errors import ConfigError, SpeedrunError
from speedrun.science.adding import TOKENS, Adding
from speedrun.science.compare import TIMES, Entry, shares_within
from speedrun.science.finish import SHORTEST, finish
from speedrun.science.jobs import (
    LAST_LOSS,
    RunSet,
    common_dataset,
    config_of,
    plan_jobs,
    refuse_own_keys,
    this_command,
)
from speedrun.science.results import Effect, Race
from speedrun.science.share import ONE_A_CORE, share_machine
from speedrun.science.space import Budget
from speedrun.science.tune import default_ranges, tune
from speedrun.science.until import Until
from speedrun.train.evaluate import tested
from speedrun.train.run import RunFolder
from speedrun.train.summary import Environment

ALPHA = 0.05  # of the decisions that `until` waits for
TARGET_SEED = 999  # of the run that finds a target; a race counts from 0, tuning from 1000
LEARNT = 0.1  # nats that a target lies below the loss of a model that has learnt nothing
MARGIN = 0.05  # share of the tokens within which two recipes are equal


def race(
    *,
    recipes: Sequence[str],
    track: str,
    seeds: int = 3,
    until: Until | None = None,
    margin: float | None = None,
    finished: bool = False,
    tuned: Budget | None = None,
    out: Path,
    say: Callable[[str], None],
    overrides: Sequence[str] = (),
    budget: int | None = None,
    jobs_at_once: int | None = None,
) -> Race:
    """Make the runs that are missing and write `out/race.json`; returns what is in it.

    Without `jobs_at_once` one at a time, since seconds count, or as the race was begun. Where every
    schedule is finished they do not, and one goes on each core.
    """
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds} cannot be used: at least 1")
    if until and finished:
        raise ConfigError(
            "--until cannot be used with --finish, whose seeds are fixed beforehand; give --seeds"
        )
    if margin is not None and not until:
        raise ConfigError("--margin is for --until: add --until decided, or leave it out")
    within = MARGIN if margin is None else margin
    if not 0 < within < 1:
        raise ConfigError(f"--margin {margin} cannot be used: it is a share of tokens, as 0.05")
    if finished and budget is not None and budget < SHORTEST:
        raise ConfigError(
            f"--budget {budget} cannot be used with --finish, whose runs have {SHORTEST} steps at "
            "least"
        )
    own = ("train.seed", "train.stop", "machine.jobs", *(("train.steps",) if finished else ()))
    refuse_own_keys(overrides, own)
    if tuned:
        recipes = _tune(recipes, track, tuned, overrides, budget, out, say)
    target = _common_target(recipes, track, overrides)
    if not target:
        target = _found_target(recipes[0], track, overrides, budget, out, say)
        overrides = (*overrides, f"train.target:={target}")
    variants = _variants(recipes, track, overrides, budget, finished)
    jobs = plan_jobs(variants, track, range(2 if until else seeds))
    fingerprint = common_dataset(jobs)
    runs = RunSet(out, fingerprint)
    otherwise = ONE_A_CORE if finished else 1
    share = share_machine(runs, jobs, jobs_at_once, otherwise=otherwise, say=say)
    effects: tuple[Effect, ...] = ()
    stopped, without = None, list[str]()
    if finished:
        entries, without = finish(runs, share, variants, track, seeds, target, budget, say)
    elif until:
        adding = Adding(runs, share, variants, track, TOKENS, ALPHA, math.log1p(within))
        decisions, by_label, stopped = adding.run(until.from_now(), say)
        effects = adding.effects(decisions, "log tokens_to_target")
        entries = [entry for group in by_label.values() for entry in group.values()]
    else:
        entries = runs.run_all([share.of(job) for job in jobs], say)
    entries, notes = _on_one_machine(entries, out)
    entries, more = _tested(entries, out)
    found = Race(
        track=track,
        target=target,
        seeds=max(Counter(entry.recipe for entry in entries).values(), default=0),
        tuned=str(tuned) if tuned else None,
        finished=finished,
        until=until.text if until else None,
        stopped=stopped,
        alpha=ALPHA if until else None,
        margin=within if until else None,
        jobs=share.jobs,
        command=this_command(),
        dataset_fingerprint=fingerprint,
        recipes=tuple(variants),
        entries=tuple(entries),
        effects=effects,
        notes=(*without, *notes, *more),
    )
    found.write(out / "race.json")
    return found


def _tune(
    recipes: Sequence[str],
    track: str,
    budget: Budget,
    overrides: Sequence[str],
    longest: int | None,
    out: Path,
    say: Callable[[str], None],
) -> list[str]:
    """The recipes with their rates searched, each with the same budget and ranges as wide.

    How many trials go at a time is the machine's affair: no seconds are compared in them. Like the
    runs of the race they are no longer than `longest` steps.
    """
    files = []
    for recipe in recipes:
        config = config_of(recipe, track, overrides)
        words = (*overrides, *_cut(config, longest))
        over = default_ranges(config, track)
        say(f"tuning {config.recipe} with {budget} over {', '.join(map(str, over))}")
        folder = out / "tuning" / config.recipe
        found = tune(recipe=recipe, track=track, over=over, budget=budget, out=folder, say=say,
                     overrides=words)  # fmt: skip
        files.append(str(folder / found.file))
    return files


def _variants(
    recipes: Sequence[str],
    track: str,
    overrides: Sequence[str],
    budget: int | None,
    finished: bool,
) -> dict[str, tuple[str, Sequence[str]]]:
    """By the recipe's name: its file and overrides. A budget of finished runs is `finish`'s."""
    variants: dict[str, tuple[str, Sequence[str]]] = {}
    for recipe in recipes:
        own = config_of(recipe, track, overrides)
        if own.recipe in variants:
            raise ConfigError(f"two recipes of the race are called {own.recipe!r}; rename one")
        how = LAST_LOSS if finished else ("train.stop=target", *_cut(own, budget))
        variants[own.recipe] = recipe, (*overrides, *how)
    return variants


def _cut(config: Config, longest: int | None) -> tuple[str, ...]:
    return (f"train.steps={longest}",) if longest and longest < config.steps else ()


def _common_target(recipes: Sequence[str], track: str, overrides: Sequence[str]) -> float:
    """0: none of them has one, as on a text of a user's own."""
    first, *others = (config_of(recipe, track, overrides) for recipe in recipes)
    target = first.train.target
    for other in others:
        if other.train.target != target:
            raise ConfigError(
                f"{first.recipe} has the target {target}, {other.recipe} {other.train.target}; "
                "set one for all, for example --set train.target=3.5"
            )
    return target


def _found_target(
    recipe: str,
    track: str,
    overrides: Sequence[str],
    longest: int | None,
    out: Path,
    say: Callable[[str], None],
) -> float:
    """A target for a text that has none: the first recipe's lowest loss, to a tenth above.

    So were those of the built-in tracks found, where the lowest is the last. It takes a run with a
    seed that no race uses.
    """
    config = config_of(recipe, track, overrides)
    words = (*overrides, "train.stop=steps", *_cut(config, longest))
    jobs = plan_jobs({f"{config.recipe} to its end": (recipe, words)}, track, [TARGET_SEED])
    say(f"no target is set: {config.recipe} is trained to its end first, to find one")
    runs = RunSet(out, common_dataset(jobs))
    (entry,) = runs.run_all(jobs, say)
    if entry.val_loss is None:
        raise ConfigError(
            f"{config.recipe} diverged, so it gives no target; set one, for example --set "
            "train.target=3.5"
        )
    losses = runs.folder(jobs[0]).validation_losses()
    target = target_above(losses, config.recipe)
    step = min(losses, key=losses.__getitem__)
    say(f"target {target:g}: {config.recipe} was at {losses[step]:.4f} after step {step}, its "
        "best; --set train.target=LOSS sets another")  # fmt: skip
    return target


def target_above(losses: Mapping[int, float], recipe: str) -> float:
    """The next tenth above the lowest of a run's validation losses, which are by step.

    A small text is soon learnt by heart, so the last loss may lie above the first. A target that a
    run has before it learns anything would be reached by all at once.
    """
    first, lowest = losses[0], min(losses.values())
    target = math.ceil(10 * lowest) / 10
    if target > first - LEARNT:
        raise ConfigError(
            f"{recipe} learns too little here to find a target by: its validation loss is "
            f"{first:.4f} before the first step and {lowest:.4f} at best; build the dataset from "
            "more text, or set a target, --set train.target=LOSS"
        )
    return target


def _on_one_machine(entries: Sequence[Entry], out: Path) -> tuple[list[Entry], list[str]]:
    """Without the seconds of runs made elsewhere: tokens and losses may be shared, times not."""
    machines: list[str] = []
    for entry in entries:
        environment = Environment.read(RunFolder(out / str(entry.run)).environment)
        machines.append(machine_of(environment))
    usual, count = Counter(machines).most_common(1)[0] if machines else ("", 0)
    if count == len(entries):
        return [*entries], []
    nowhere = dict.fromkeys(TIMES)
    kept = [
        entry if machine == usual else entry.model_copy(update=nowhere)
        for entry, machine in zip(entries, machines, strict=True)
    ]
    return kept, [
        f"{len(entries) - count} of {len(entries)} runs were made on another machine or with other "
        "libraries or kernels; their tokens and losses count, their seconds do not"
    ]


def machine_of(environment: Environment | None) -> str:
    """What seconds depend on, as one text; a run that moved between machines is on none."""
    if environment is None:
        return "unknown"
    return f"{environment.machine} {environment.earlier or ''}"


def _tested(entries: Sequence[Entry], out: Path) -> tuple[list[Entry], list[str]]:
    """With the losses of the last weights on the test split."""
    found, notes = [], Counter[str]()
    for entry in entries:
        loss = None
        if entry.run is not None:
            try:
                result = tested(RunFolder(out / entry.run))
                loss = result.loss if result else None
                notes["the dataset has no test split"] += result is None
            except SpeedrunError as error:
                notes[f"not tested: {error}"] += 1
        found.append(entry.model_copy(update={"test_loss": loss}))
    return found, [note for note, count in notes.items() if count]


def profile(
    races: Sequence[Race], metric: str = "tokens_to_target"
) -> Mapping[str, list[tuple[float, float]]]:
    """Performance profiles over tracks: by recipe, the share of tracks within a factor of the best.

    Points (factor, share), one for each track on which the recipe has a figure. Where it has none
    it is within no factor.
    """
    recipes = [*dict.fromkeys(recipe for one in races for recipe in one.order)]
    tables = [
        {
            recipe: rows[metric].mean or 0.0
            for recipe, rows in one.statistics().items()
            if metric in rows and rows[metric].mean
        }
        for one in races
    ]
    return shares_within(recipes, tables)
