"""`speedrun race`: recipes on equal data, several seeds, to a target: how much sooner is each?

Every run ends at the first validation at or below the track's target, or at its budget of steps. A
recipe's cost is what its runs needed to reach the target; where a seed did not reach it there is no
mean, and the table says how many did. Ratios are to the first recipe, with 95% intervals paired by
seed.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from speedrun.config.resolve import resolve
from speedrun.errors import ConfigError
from speedrun.science.jobs import Done, Workshop, common_dataset, plan_jobs, refuse_own_keys
from speedrun.science.stats import ratio_of_means, summarize

METRICS = ("tokens_to_target", "steps_to_target", "seconds_to_target", "wall_seconds_to_target",
           "val_loss", "peak_memory_bytes")  # fmt: skip


def race(
    recipes: Sequence[str],
    track: str,
    seeds: int,
    out: Path,
    *,
    overrides: Sequence[str] = (),
    budget: int | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run what is missing and write `out/race.json`; returns what is in it."""
    names = [Path(recipe).stem if recipe.endswith(".toml") else recipe for recipe in recipes]
    if len(set(names)) < len(names):
        raise ConfigError(f"the names of a race's recipes must differ: {', '.join(names)}")
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds} cannot be used: at least 1")
    refuse_own_keys(overrides, ("train.seed", "train.stop"))
    variants: dict[str, tuple[str, Sequence[str]]] = {}
    for name, recipe in zip(names, recipes, strict=True):
        own = resolve(recipe, track, overrides).config.steps
        cut = (f"train.steps={budget}",) if budget and budget < own else ()
        variants[name] = recipe, (*overrides, "train.stop=target", *cut)
    jobs = plan_jobs(variants, track, seeds)
    target = jobs[0].config.train.target
    if not target:
        raise ConfigError(f"track {track!r} has no target; set one, for example train.target=3.5")
    for job in jobs:
        if job.config.train.target != target:
            raise ConfigError(
                f"{names[0]} has the target {target}, {job.label} {job.config.train.target}; "
                "set one for all, for example --set train.target=3.5"
            )
    dataset = common_dataset(jobs)
    shop = Workshop(out, track, dataset.fingerprint)
    entries = [entry(done, out) for done in shop.run_all(jobs, say)]
    result = {
        "kind": "race",
        "track": track,
        "target": target,
        "seeds": seeds,
        "command": shlex.join(["speedrun", *sys.argv[1:]]),
        "dataset_fingerprint": dataset.fingerprint,
        "recipes": names,
        "entries": entries,
        "statistics": statistics(names, entries),
    }
    temporary = out / "race.json.partial"
    temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    temporary.replace(out / "race.json")
    return result


def entry(done: Done, out: Path) -> dict[str, Any]:
    summary = done.summary
    tokens = summary["tokens_to_target"]
    per_step = done.job.config.batch.tokens
    return {
        "recipe": done.job.label,
        "seed": done.job.seed,
        "run": str(done.folder.relative_to(out)),
        "tokens_to_target": tokens,
        "steps_to_target": None if tokens is None else tokens // per_step,
        "seconds_to_target": summary["seconds_to_target"],
        "wall_seconds_to_target": summary["wall_seconds_to_target"],
        "val_loss": summary["val_loss"],
        "params": summary["params"],
        "peak_memory_bytes": summary["peak_memory_bytes"],
    }


def statistics(names: Sequence[str], entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By recipe and metric: n, mean, std, 95% interval, ratio to the first recipe with its own."""
    table: dict[str, Any] = {}
    for name in names:
        table[name] = {}
        for metric in METRICS:
            values = [e[metric] for e in entries if e["recipe"] == name]
            first = [e[metric] for e in entries if e["recipe"] == names[0]]
            reached = [float(v) for v in values if v is not None]
            base = [float(v) for v in first if v is not None]
            row: dict[str, Any] = {"n": len(reached), "of": len(values)}
            # The mean of those that arrived would flatter a recipe whose slow seeds did not.
            if len(reached) == len(values):
                stats = summarize(reached)
                row |= {"mean": stats.mean, "std": stats.std, "low": stats.low, "high": stats.high}
            # A target that is met before the first step has no ratio.
            if len(reached) == len(base) == len(values) and metric != "val_loss" and any(base):
                ratio = ratio_of_means(reached, base, paired=True)
                row |= {"ratio": ratio.ratio, "ratio_low": ratio.low, "ratio_high": ratio.high}
            table[name][metric] = row
    return table
