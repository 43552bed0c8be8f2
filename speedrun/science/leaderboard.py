"""A local leaderboard: sets of runs that kept a track's rules, and refused ones that did not.

The rules are the speedrun's: the mean final loss is at or below the target at p < alpha; all runs
stop at the same step, chosen before they ran; same recipe, data and code; every seed once.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speedrun.config.files import chain, flatten
from speedrun.errors import ConfigError, RunError
from speedrun.science.stats import mean
from speedrun.science.verify import gather, verify
from speedrun.train.run import RunFolder

DEFAULT = Path("leaderboard.json")
LEVEL = 0.01
# What a track decides and a run may not: the target, what is validated on, and the text.
TRACKS_OWN = ("train.target", "validation.tokens", "data.sources", "data.tokenizer",
              "data.val_fraction")  # fmt: skip
MINE = ("train.seed", "train.threads", "data.dir")  # may differ between the runs of an entry
RULES = {
    "one track": "all runs are of one track, with its target",
    "the track's own": "a run leaves to the track what is validated, on what text, to what target",
    "same recipe": "all runs have the same config but for the seed",
    "same data": "all runs are trained and validated on the same dataset",
    "same code": "all runs are made by the same code",
    "same stop": "all runs stop at the same step, chosen before they ran",
    "every seed once": "no two runs share a seed",
    "significant": "the mean final loss is at or below the target at p < {alpha}",
}


def _refuse(rule: str, found: str, **values: Any) -> RunError:
    return RunError(f"refused by the rule '{RULES[rule].format(**values)}': {found}")


def check(paths: Sequence[Path], alpha: float) -> dict[str, Any]:
    """The entry these runs make, or the first rule they break."""
    folders = [RunFolder(path) for path in paths]
    if any(folder.read_summary().get("stopped_early") for folder in folders):
        raise _refuse("same stop", "one of the runs was stopped before its end")
    runs, _ = gather(paths)
    configs = [folder.load_config() for folder in folders]
    summaries = [json.loads(folder.summary.read_text()) for folder in folders]
    places = [json.loads(folder.environment.read_text()) for folder in folders]
    target = configs[0].train.target
    if len({config.track for config in configs}) > 1 or not target:
        raise _refuse("one track", ", ".join(sorted({config.track for config in configs})))
    first = dict(flatten(configs[0].model_dump(mode="json")))
    for path, config in zip(paths, configs, strict=True):
        for key, value in flatten(config.model_dump(mode="json")):
            if value != first[key] and key not in MINE:
                raise _refuse("same recipe", f"{key} is {value!r} in {path}, not {first[key]!r}")
    for key, value in track_values(configs[0].track).items():
        if key in TRACKS_OWN and first[key] != value:
            raise _refuse("the track's own", f"{key} is {first[key]!r}, not {value!r}")
    if alpha > LEVEL:
        raise _refuse("significant", f"--alpha {alpha} is weaker", alpha=LEVEL)
    if configs[0].train.stop != "steps":
        raise _refuse("same stop", "train.stop = 'target' lets each run choose its own end")
    for rule, values in (
        ("same data", {s["dataset_fingerprint"][:12] for s in summaries}),
        ("same code", {place["code_sha256"][:12] for place in places}),
        ("same stop", {s["steps"] for s in summaries}),
    ):
        if len(values) > 1:
            raise _refuse(rule, f"found {', '.join(map(str, sorted(values)))}")
    if len({run.seed for run in runs}) < len(runs):
        raise _refuse("every seed once", f"seeds {', '.join(str(run.seed) for run in runs)}")
    verdict = verify([run.loss for run in runs], target, alpha=alpha)
    if not verdict.holds:
        p = "undefined" if verdict.p is None else f"{verdict.p:.3g}"
        raise _refuse("significant", f"n = {verdict.n}, mean {verdict.mean}, p {p}", alpha=alpha)
    return {
        "track": configs[0].track,
        "recipe": configs[0].recipe,
        "target": target,
        "n": verdict.n,
        "mean": verdict.mean,
        "std": verdict.std,
        "p": verdict.p,
        "alpha": alpha,
        "steps": summaries[0]["steps"],
        "tokens": summaries[0]["tokens"],
        "train_seconds": mean([s["train_seconds"] for s in summaries]),
        "wall_seconds": mean([s["wall_seconds"] for s in summaries]),
        "params": summaries[0]["params"],
        "machine": f"{places[0]['gpu'] or places[0]['cpu']}, {places[0]['cores']} cores",
        "dataset_fingerprint": summaries[0]["dataset_fingerprint"],
        "code_sha256": places[0]["code_sha256"],
        "config_sha256": config_hash(first),
        "seeds": sorted(run.seed for run in runs),
        "date": time.strftime("%Y-%m-%d"),
    }


def track_values(track: str) -> dict[str, Any]:
    """What a built-in track sets; of a user's own track only its name is known here."""
    try:
        layers = chain("track", track)
    except ConfigError:
        return {}
    return {key: value for layer in layers for key, value in layer.values.items()}


def config_hash(values: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in values.items() if key not in MINE}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def read(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))["entries"]
        assert isinstance(entries, list)
        return entries
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        raise ConfigError(f"{file} is not a leaderboard; give another --file") from None


def submit(paths: Sequence[Path], file: Path, alpha: float) -> dict[str, Any]:
    """Check the runs and add their entry; the same entry is not added twice."""
    entry, entries = check(paths, alpha), read(file)

    def identity(one: dict[str, Any]) -> tuple[Any, ...]:
        return (
            one["track"],
            one["recipe"],
            one["code_sha256"],
            one["dataset_fingerprint"],
            one["config_sha256"],
            *one["seeds"],
        )

    entries = [one for one in entries if identity(one) != identity(entry)] + [entry]
    entries.sort(key=lambda one: (one["track"], one["train_seconds"]))
    temporary = file.with_name(f"{file.name}.partial")
    temporary.write_text(json.dumps({"entries": entries}, indent=2) + "\n", encoding="utf-8")
    temporary.replace(file)
    return entry
