"""`speedrun ablate`: what is each technique of a recipe worth?

One technique at a time is switched off (or set as asked) and compared with the whole recipe, seed
by seed on the same data: the effect on the final loss and on what it takes to reach the target, its
interval, a paired p-value corrected by Holm over the family, and how many more seeds would settle
what is undecided. All runs go to the end of their schedule, for a loss half-way predicts little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from speedrun.config.resolve import describe, parse_override, resolve, techniques, toml_text
from speedrun.config.schema import Config
from speedrun.errors import ConfigError
from speedrun.science.compare import Entry, comparable
from speedrun.science.jobs import RunSet, common_dataset, plan_jobs, refuse_own_keys, this_command
from speedrun.science.results import Ablation, Effect
from speedrun.science.share import ONE_A_CORE, share_machine
from speedrun.science.stats import holm, more_pairs, paired_difference

METRICS = ("val_loss", "tokens_to_target", "seconds_to_target")


def changes(config: Config, switches: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """What is compared with the recipe, as overrides by name: `switches`, or each technique off."""
    if not switches:
        return {
            name: tuple(f"{key}={toml_text(value)}" for key, value in off.items())
            for name, off in techniques(config).items()
        }
    for switch in switches:
        key, _ = parse_override(switch)
        if key not in describe():
            near = get_close_matches(key, describe(), n=1, cutoff=0.0)[0]
            raise ConfigError(f"--switch {switch!r}: unknown key {key!r}; nearest known: {near!r}")
    return {switch: (switch,) for switch in switches}


def ablate(
    *,
    recipe: str,
    track: str,
    seeds: int,
    out: Path,
    say: Callable[[str], None],
    switches: Sequence[str] = (),
    overrides: Sequence[str] = (),
    alpha: float = 0.05,
    jobs_at_once: int | None = None,
) -> Ablation:
    """Make the runs that are missing and write `out/ablation.json`; returns what is in it.

    Without `jobs_at_once` one a core at a time, or as the ablation was begun.
    """
    if seeds < 2:
        raise ConfigError(f"--seeds {seeds} cannot be used: pairs need at least 2 for an interval")
    if not 0 < alpha < 1:
        raise ConfigError(f"--alpha {alpha} cannot be used: it is a probability, such as 0.05")
    refuse_own_keys((*overrides, *switches), ("train.seed", "machine.jobs"))
    base = resolve(recipe, track, overrides).config
    name, compared = base.recipe, changes(base, switches)
    variants: dict[str, tuple[str, Sequence[str]]] = {name: (recipe, overrides)} | {
        f"{name} {label}": (recipe, (*overrides, *settings)) for label, settings in compared.items()
    }
    jobs = plan_jobs(variants, track, seeds)  # refuses what cannot be, before any run
    fingerprint = common_dataset(jobs)
    made = RunSet(out, fingerprint)
    jobs = share_machine(made, jobs, jobs_at_once, otherwise=ONE_A_CORE, say=say)
    shared = jobs[0].config.machine.jobs
    runs: dict[str, list[Entry]] = {label: [] for label in variants}
    for entry in made.run_all(jobs, say):
        runs[entry.recipe].append(entry)
    found = Ablation(
        recipe=name,
        track=track,
        seeds=seeds,
        alpha=alpha,
        jobs=shared,
        command=this_command(),
        dataset_fingerprint=fingerprint,
        settings=compared,
        effects=effects(
            {label: runs[f"{name} {label}"] for label in compared},
            runs[name],
            alpha,
            comparable(METRICS, shared),
        ),
        runs=tuple(str(entry.run) for group in runs.values() for entry in group),
    )
    found.write(out / "ablation.json")
    return found


def effects(
    variants: Mapping[str, Sequence[Entry]],
    control: Sequence[Entry],
    alpha: float,
    metrics: Sequence[str] = METRICS,
) -> tuple[Effect, ...]:
    """Effects by metric; Holm corrects over the variants of one metric.

    Every list of runs is in the same order of seeds.
    """
    found = []
    for metric in metrics:
        family = [_effect(name, runs, control, metric, alpha / len(variants))
                  for name, runs in variants.items()]  # fmt: skip
        for effect, p in zip(family, holm([effect.p for effect in family]), strict=True):
            decided = p is not None and p < alpha
            more = 0 if decided else effect.more_seeds
            after = {"p_holm": p, "decided": decided, "more_seeds": more}
            found.append(effect.model_copy(update=after))
    return tuple(found)


def _effect(
    switch: str, runs: Sequence[Entry], control: Sequence[Entry], metric: str, alpha: float
) -> Effect:
    """On one metric, before the correction.

    There is no effect where a pair lacks a number, as a run that never reached the target lacks
    the tokens to it: the pairs that have it would flatter the slower of the two.
    """
    pairs = [
        (getattr(run, metric), getattr(other, metric))
        for run, other in zip(runs, control, strict=True)
    ]
    known = [pair for pair in pairs if None not in pair]
    if len(known) < len(runs) or not known:
        return Effect(switch=switch, metric=metric, n=len(known), of=len(runs), effect=None)
    found = paired_difference(*zip(*known, strict=True))
    return Effect(
        switch=switch, metric=metric, of=len(runs), effect=found.mean, **vars(found),
        more_seeds=more_pairs([a - b for a, b in known], alpha),
    )  # fmt: skip
