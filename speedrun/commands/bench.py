"""`speedrun bench NAME`: each bench measures rivals side by side in one process and returns a flat
dict. Names are those of the modules of speedrun/bench."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from importlib import import_module

from speedrun.errors import ConfigError, quoted
from speedrun.terminal.console import print_table

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


NAMES = (
    "build", "loader", "attention", "fused", "mask", "step", "muon", "checkpoint", "ranks", "race",
    "start", "sample", "serve", "claims", "plan",
)  # fmt: skip
BENCHES: dict[str, Callable[[], Figures]] = {name: partial(_module, name) for name in NAMES}
BENCHES |= {"loader": _loader, "muon": _muon}


def bench_command(name: str, as_json: bool) -> None:
    if name and name not in BENCHES:
        near = get_close_matches(name, BENCHES, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"bench {quoted(name)} is not known; nearest: {near!r} (known: {', '.join(BENCHES)})"
        )
    if as_json and not name:
        raise ConfigError(f"bench --json needs one name: {', '.join(BENCHES)}")
    for chosen in [name] if name else BENCHES:
        figures = {**BENCHES[chosen](), **machine()}
        if as_json:
            print(json.dumps(figures))
            continue
        print(f"bench {chosen}")
        (print_step if chosen == "step" else print_figures)(figures)


def machine() -> Figures:
    """A figure means little without it."""
    import torch

    from speedrun.hardware import cpu_name
    from speedrun.limits import cores, threads

    return {
        "cpu": cpu_name(), "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": cores(), "threads": threads(), "torch": torch.__version__,
    }  # fmt: skip


def print_figures(figures: Figures) -> None:
    width = max(len(key) for key in figures)
    for key, value in figures.items():
        shown = f"{value:,.6g}" if isinstance(value, float) else str(value)
        print(f"  {key:{width}}  {shown}")


def print_step(figures: Figures) -> None:
    """A row for each model, then what concerns all."""
    from speedrun.bench.step import KINDS, MODELS

    kinds = (*KINDS, "optimizer", "other")
    rows = []
    for name in MODELS:
        share, ms = figures[f"peak_share_{name}"], 1e3 * float(figures[f"step_seconds_{name}"])
        speed, peak = (figures[f"{key}_{name}"] for key in ("tokens_per_second", "peak_flops"))
        of_time = [f"{float(figures[f'share_{name}_{kind}']):.0%}" for kind in kinds]
        rows.append((name.replace("_", "-"), f"{share:.2f}", f"{float(peak) / 1e9:.0f}",
                     f"{ms:.1f}", f"{speed:,.0f}", *of_time))  # fmt: skip
    print_table(("model", "of peak", "GFLOP/s", "ms", "tokens/s", *kinds), rows)
    print(f"\n{figures['cpu']}, {figures['instructions']}, {figures['threads']} threads; "
          f"kernels: {figures['compiled']}")  # fmt: skip
    print(f"built in {figures['compile_seconds_cold']:.1f} s, "
          f"loaded again in {figures['compile_seconds_warm']:.2f} s")  # fmt: skip
