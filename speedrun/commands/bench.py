"""`speedrun bench NAME`: each bench measures rivals side by side in one process and returns a flat
dict. Names are those of the modules of speedrun/bench."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from importlib import import_module

from speedrun.errors import ConfigError

Figures = Mapping[str, float | int | str]


def _loader() -> Figures:
    from speedrun.bench.loader import measure_loader
    from speedrun.bench.step import nano_config, nano_step_seconds

    config = nano_config()
    batch = config.batch
    figures = measure_loader()
    nano = measure_loader(
        seq_len=batch.length, batch_tokens=batch.tokens, order=config.data.order, repeats=3
    )
    step_seconds = nano_step_seconds()
    return {
        **figures,
        "nano_tokens_per_second": nano["tokens_per_second"],
        "nano_step_seconds": step_seconds,
        "share_of_step": batch.tokens / float(nano["tokens_per_second"]) / step_seconds,
    }


def _muon() -> Figures:
    from speedrun.bench.muon import measure_muon
    from speedrun.bench.step import optimizer_share

    return {**measure_muon(), "share_of_step": optimizer_share()}


def _module(name: str) -> Figures:
    """`measure_NAME()` of the module of that name, imported when it is asked for."""
    figures: Figures = getattr(import_module(f"speedrun.bench.{name}"), f"measure_{name}")()
    return figures


NAMES = ("loader", "attention", "fused", "mask", "step", "muon", "checkpoint", "ranks", "race",
         "claims")  # fmt: skip
BENCHES: dict[str, Callable[[], Figures]] = {name: partial(_module, name) for name in NAMES}
BENCHES |= {"loader": _loader, "muon": _muon}


def bench_command(name: str, as_json: bool) -> None:
    if name and name not in BENCHES:
        near = get_close_matches(name, BENCHES, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"bench {name!r} is not known; nearest: {near!r} (known: {', '.join(BENCHES)})"
        )
    if as_json and not name:
        raise ConfigError(f"bench --json needs one name: {', '.join(BENCHES)}")
    for chosen in [name] if name else BENCHES:
        figures = BENCHES[chosen]()
        if as_json:
            print(json.dumps(figures))
            continue
        print(f"bench {chosen}")
        print_figures(figures)


def print_figures(figures: Figures) -> None:
    width = max(len(key) for key in figures)
    for key, value in figures.items():
        shown = f"{value:,.6g}" if isinstance(value, float) else str(value)
        print(f"  {key:{width}}  {shown}")
