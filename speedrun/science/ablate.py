"""`speedrun ablate`: what is each technique of a recipe worth?

One technique at a time is switched off (or set as asked) and compared with the whole recipe, seed
by seed on the same data: the effect on the final loss and on what it takes to reach the target, its
interval, a paired p-value corrected by Holm over the family, and how many more seeds would settle
what is undecided. All runs go to the end of their schedule, for a loss half-way predicts little.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from speedrun.config.files import flatten
from speedrun.config.resolve import describe, parse_override, resolve
from speedrun.config.schema import Config
from speedrun.errors import ConfigError
from speedrun.science.jobs import Done, Workshop, common_dataset, plan_jobs, refuse_own_keys
from speedrun.science.stats import holm, more_pairs, paired_difference

# A technique and the settings that are without it. Those a recipe already has are left out.
OFF: dict[str, tuple[str, ...]] = {
    "Muon": ("optimizer.kind=adamw",),
    "momentum warm-up": ("schedule.momentum_warmup=0",),
    "window": ("attention.window=none", "attention.window_start=0", "attention.window_end=0"),
    "document mask": ("attention.documents=false",),
    "QK-norm": ("model.qk_norm=false",),
    "ReLU squared": ("model.activation=gelu",),
    "zero-initialised projections": ("model.zero_init_projections=false",),
    "untied head": ("model.tied_head=true",),
    "embedding norm": ("model.embedding_norm=false",),
    "softcap": ("model.softcap=0.0",),
    "x0 mixing": ("model.x0_mixing=false",),
    "value residual": ("model.value_residual=false",),
    "value embeddings": ("model.value_embeddings=none",),
    "pair of value weights": ("model.value_weights=blend",),
    "U-net skips": ("model.unet_skips=false",),
    "half-truncated rotary": ("model.positions=rotary", "model.key_offset=false"),
    "layer without attention": ("model.attention_free=[]",),
    "key offset": ("model.key_offset=false",),
    "bigram table": ("model.bigram_rows=0",),
}
METRICS = ("val_loss", "tokens_to_target", "seconds_to_target")


def techniques(config: Config) -> dict[str, tuple[str, ...]]:
    """The techniques a config has, each with what switches it off."""
    values = dict(flatten(config.model_dump(mode="json")))

    def has(settings: tuple[str, ...]) -> bool:
        return any(values[key] != value for key, value in map(parse_override, settings))

    return {name: settings for name, settings in OFF.items() if has(settings)}


def family(config: Config, switches: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """What is to be compared: the switches given, or every technique the recipe has."""
    if not switches:
        return techniques(config)
    for switch in switches:
        key, _ = parse_override(switch)
        if key not in describe():
            near = get_close_matches(key, describe(), n=1, cutoff=0.0)[0]
            raise ConfigError(f"--switch {switch!r}: unknown key {key!r}; nearest known: {near!r}")
    return {switch: (switch,) for switch in switches}


def ablate(
    recipe: str,
    track: str,
    seeds: int,
    out: Path,
    *,
    switches: Sequence[str] = (),
    overrides: Sequence[str] = (),
    alpha: float = 0.05,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run what is missing and write `out/ablation.json`; returns what is in it."""
    if seeds < 2:
        raise ConfigError(f"--seeds {seeds} cannot be used: pairs need at least 2 for an interval")
    if not 0 < alpha < 1:
        raise ConfigError(f"--alpha {alpha} cannot be used: it is a probability, such as 0.05")
    refuse_own_keys((*overrides, *switches), ("train.seed",))
    base = resolve(recipe, track, overrides).config
    compared = family(base, switches)
    name = Path(recipe).stem if recipe.endswith(".toml") else recipe
    variants: dict[str, tuple[str, Sequence[str]]] = {name: (recipe, overrides)} | {
        f"{name} {label}": (recipe, (*overrides, *settings)) for label, settings in compared.items()
    }
    jobs = plan_jobs(variants, track, seeds)  # refuses what cannot be, before any run
    dataset = common_dataset(jobs)
    shop = Workshop(out, track, dataset.fingerprint)
    done: dict[str, list[Done]] = {}
    for result in shop.run_all(jobs, say):
        done.setdefault(result.job.label, []).append(result)
    found = {
        "kind": "ablation",
        "recipe": name,
        "track": track,
        "seeds": seeds,
        "alpha": alpha,
        "command": shlex.join(["speedrun", *sys.argv[1:]]),
        "dataset_fingerprint": dataset.fingerprint,
        "settings": {label: list(settings) for label, settings in compared.items()},
        "effects": effects(
            {label: values(done[f"{name} {label}"]) for label in compared},
            values(done[name]),
            alpha,
        ),
        "runs": [str(r.folder.relative_to(out)) for group in done.values() for r in group],
    }
    temporary = out / "ablation.json.partial"
    temporary.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    temporary.replace(out / "ablation.json")
    return found


def values(runs: Sequence[Done]) -> dict[str, list[float | None]]:
    return {metric: [run.summary[metric] for run in runs] for metric in METRICS}


def effects(
    variants: Mapping[str, Mapping[str, Sequence[float | None]]],
    control: Mapping[str, Sequence[float | None]],
    alpha: float,
) -> list[dict[str, Any]]:
    """Paired effects by metric; Holm corrects over the variants of one metric.

    There is no effect where a pair lacks a number, as a run that never reached the target lacks
    the tokens to it: the pairs that have it would flatter the slower of the two.
    """
    rows: list[dict[str, Any]] = []
    for metric in METRICS:
        family_rows = []
        for label, measured in variants.items():
            pairs = [
                (treated, plain)
                for treated, plain in zip(measured[metric], control[metric], strict=True)
                if treated is not None and plain is not None
            ]
            row: dict[str, Any] = {"switch": label, "metric": metric, "n": len(pairs)}
            row["of"] = len(measured[metric])
            row |= dict.fromkeys(("effect", "std", "low", "high", "p", "more_seeds"))
            if pairs and row["n"] == row["of"]:
                difference = paired_difference([a for a, _ in pairs], [b for _, b in pairs])
                row |= {
                    "effect": difference.mean,
                    "std": difference.std,
                    "low": difference.low,
                    "high": difference.high,
                    "p": difference.p,
                    "more_seeds": more_pairs(
                        [a - b for a, b in pairs], alpha=alpha / len(variants)
                    ),
                }
            family_rows.append(row)
        for row, corrected in zip(family_rows, holm([r["p"] for r in family_rows]), strict=True):
            row["p_holm"] = corrected
            row["decided"] = corrected is not None and corrected < alpha
            if row["decided"]:
                row["more_seeds"] = 0
        rows += family_rows
    return rows
