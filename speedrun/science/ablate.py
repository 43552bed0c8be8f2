"""`speedrun ablate`: what is each technique of a recipe worth?

One technique at a time is switched off (or set as asked) and compared with the whole recipe, seed
by seed on the same data. All runs go to the end of their schedule, for a loss half-way predicts
little.

With a number of seeds fixed beforehand: the effect on the final loss and on what it takes to reach
the target, its interval, a paired p-value corrected over the family, and how many more seeds would
settle what is undecided. With `until`: seeds one at a time, for those that are still undecided, by
bets that may be looked at after every seed (`sequential.py`). Either way a technique helps, hurts,
or is equal within a margin.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from speedrun.config.fixed import Fixed, of_track
from speedrun.config.keys import describe, is_argument, techniques, whole
from speedrun.config.resolve import parse_override, resolve, toml_text
from speedrun.config.schema import Config
from speedrun.errors import ConfigError, quoted
from speedrun.science.adding import LOSS, Adding, Runs, last_loss
from speedrun.science.compare import Entry, cell_width, comparable
from speedrun.science.jobs import (
    LAST_LOSS,
    RunSet,
    common_dataset,
    plan_jobs,
    refuse_own_keys,
    this_command,
)
from speedrun.science.results import Ablation, Effect
from speedrun.science.sequential import Verdict, adjust
from speedrun.science.share import ONE_A_CORE, share_machine
from speedrun.science.stats import equality, more_pairs, paired_difference
from speedrun.science.until import Until

METRICS = ("val_loss", "tokens_to_target", "seconds_to_target")
MARGIN = 0.01  # nats


def changes(
    config: Config, switches: Sequence[str], fixed: Fixed | None = None
) -> dict[str, tuple[str, ...]]:
    """What is compared with the recipe, as overrides by name: each technique off, or `switches`.

    A switch is KEY=VALUE or the name of a technique that the recipe has. Without any, techniques
    that the track fixes are left as they are.
    """
    off = {
        name: tuple(f"{key}={toml_text(value)}" for key, value in settings.items())
        for name, settings in techniques(config).items()
        if switches or not (fixed and any(map(fixed.holds, settings)))
    }
    if not switches:
        return off
    for switch in switches:
        if switch in off:
            continue
        if "=" not in switch:
            raise ConfigError(
                f"--switch {quoted(switch)}: {config.recipe} has no technique of that name, only "
                f"{', '.join(off) or 'none'}; or write KEY=VALUE"
            )
        key = whole(parse_override(switch)[0])
        if key not in describe() and not is_argument(key):
            near = get_close_matches(key, describe(), n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"--switch {quoted(switch)}: unknown key {quoted(key)}; nearest known: {near!r}"
            )
    return {switch: off.get(switch, (switch,)) for switch in switches}


def ablate(
    *,
    recipe: str,
    track: str,
    seeds: int = 3,
    until: Until | None = None,
    out: Path,
    say: Callable[[str], None],
    switches: Sequence[str] = (),
    overrides: Sequence[str] = (),
    alpha: float = 0.05,
    margin: float = MARGIN,
    jobs_at_once: int | None = None,
) -> Ablation:
    """Make the runs that are missing and write `out/ablation.json`; returns what is in it.

    Without `jobs_at_once` one a core at a time, or as the ablation was begun. `until` takes the
    place of a fixed number of seeds.
    """
    if seeds < 2:
        raise ConfigError(f"--seeds {seeds} cannot be used: pairs need at least 2 for an interval")
    if not 0 < alpha < 1:
        raise ConfigError(f"--alpha {alpha} cannot be used: it is a probability, such as 0.05")
    if not 0 < margin < math.inf:
        raise ConfigError(f"--margin {margin} cannot be used: it is a loss in nats, such as 0.01")
    own = ("train.seed", "machine.jobs")
    refuse_own_keys(overrides, own)
    base = resolve(recipe, track, overrides).config
    name, compared = base.recipe, changes(base, switches, of_track(track))
    refuse_own_keys([word for settings in compared.values() for word in settings], own)
    if not compared:
        raise ConfigError(f"{name} has no technique that can be switched off; name one by --switch")
    common = (*overrides, *LAST_LOSS) if until else overrides
    variants: dict[str, tuple[str, Sequence[str]]] = {name: (recipe, common)} | {
        f"{name} {label}": (recipe, (*common, *settings)) for label, settings in compared.items()
    }
    planned = range(2 if until else seeds)
    jobs = plan_jobs(variants, track, planned)  # refuses what cannot be, before any run
    fingerprint = common_dataset(jobs)
    made = RunSet(out, fingerprint)
    share = share_machine(made, jobs, jobs_at_once, otherwise=ONE_A_CORE, say=say)
    begun, stopped = time.monotonic(), None
    if until is None:
        runs: Runs = {label: {} for label in variants}
        for entry in made.run_all([share.of(job) for job in jobs], say):
            runs[entry.recipe][entry.seed] = entry
        by_switch = {label: [*runs[f"{name} {label}"].values()] for label in compared}
        metrics = comparable(METRICS, share.jobs)
        found = effects(by_switch, [*runs[name].values()], alpha, margin, metrics)
    else:
        adding = Adding(made, share, variants, track, LOSS, alpha, margin)
        decisions, runs, stopped = adding.run(until, say)
        found = adding.effects(decisions, "val_loss")
    result = Ablation(
        recipe=name,
        track=track,
        seeds=max(map(len, runs.values())),
        alpha=alpha,
        margin=margin,
        until=until.text if until else None,
        stopped=stopped,
        seconds=time.monotonic() - begun,
        made=made.begun,
        jobs=share.jobs,
        command=this_command(),
        dataset_fingerprint=fingerprint,
        settings=compared,
        effects=found,
        losses={
            label.removeprefix(f"{name} "): {seed: one.val_loss for seed, one in group.items()}
            for label, group in runs.items()
        },
        runs=tuple(str(entry.run) for group in runs.values() for entry in group.values()),
    )
    result.write(out / "ablation.json")
    return result


def effects(
    variants: Mapping[str, Sequence[Entry]],
    control: Sequence[Entry],
    alpha: float,
    margin: float = MARGIN,
    metrics: Sequence[str] = METRICS,
) -> tuple[Effect, ...]:
    """Effects by metric, for a number of seeds fixed beforehand; every list in their order.

    p-values are corrected over the variants of one metric. Only a loss has a margin.
    """
    found = []
    for metric in metrics:
        family = [_effect(name, runs, control, metric, alpha / len(variants))
                  for name, runs in variants.items()]  # fmt: skip
        equal = [_equality(runs, control, margin) for runs in variants.values()]
        corrected = adjust([effect.p for effect in family], equal if metric == "val_loss" else None)
        for effect, p, p_equal in zip(family, *corrected, strict=True):
            verdict = _verdict(effect, p, p_equal, alpha)
            decided = verdict != "undecided"
            after = {
                "p_holm": p, "p_equal": p_equal, "decided": decided, "verdict": verdict,
                "more_seeds": 0 if decided else effect.more_seeds,
            }  # fmt: skip
            found.append(effect.model_copy(update=after))
    return tuple(found)


def _verdict(effect: Effect, p: float | None, p_equal: float | None, alpha: float) -> Verdict:
    if effect.effect is not None and p is not None and p < alpha:
        return "helps" if effect.effect > 0 else "hurts"
    return "equal" if p_equal is not None and p_equal < alpha else "undecided"


def _equality(runs: Sequence[Entry], control: Sequence[Entry], margin: float) -> float | None:
    gaps = [last_loss(run) - last_loss(other) for run, other in zip(runs, control, strict=True)]
    return equality(gaps, margin) if gaps and all(map(math.isfinite, gaps)) else None


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
    width = math.hypot(cell_width(runs, metric), cell_width(control, metric))
    found = paired_difference([a for a, _ in known], [b for _, b in known], width)
    return Effect(
        switch=switch, metric=metric, of=len(runs), effect=found.mean, **vars(found),
        more_seeds=more_pairs([a - b for a, b in known], alpha),
    )  # fmt: skip
