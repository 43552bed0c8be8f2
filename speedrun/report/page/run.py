"""One run folder as the page sees it: thinned curves, events, samples, where and how it ran."""

from __future__ import annotations

import shlex
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from speedrun.config.experiment import SEED
from speedrun.config.files import flatten
from speedrun.config.resolve import override_words, resolve
from speedrun.config.schedule import momentum_at, settings_at, window_at
from speedrun.config.schema import Config
from speedrun.errors import ConfigError
from speedrun.train.run import RunFolder
from speedrun.train.summary import Environment, Summary

MOST_EVENTS = 200
MOST_SAMPLES = 4
SAMPLE_CHARACTERS = 3000
SCHEDULE_POINTS = 200
CURVES = ("train", "val", "peak", "sample")
Row = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class RunData:
    folder: RunFolder
    config: Config
    validations: list[tuple[int, float]]
    dataset_fingerprint: str | None
    text: str  # what it was trained on: its track, or another text
    rates: list[tuple[int, float]]  # multipliers of the learning rates that steps were given
    shown: dict[str, Any]  # as the page's scripts read it


def read_run(folder: RunFolder, points: int) -> RunData:
    """Read a run, finished or not; `points` limits its training curve."""
    config = folder.load_config()
    rows = list(_with_clocks(folder.read_metrics()))
    summary = folder.read_summary()
    train = _latest_by_step(rows, "train")
    val = _latest_by_step(rows, "val")
    starts = [row for row in rows if row["kind"] in ("start", "resume")]
    logged = max((row["step"] for row in (*train, *val)), default=0)
    shown = {
        "name": folder.path.name,
        "path": str(folder.path),
        "seed": config.train.seed,
        "status": _status(config, rows, summary),
        "steps": summary.steps if summary else logged,
        "total_steps": config.steps,
        "batch_tokens": config.batch.tokens,
        "jobs": config.machine.jobs,
        "val": _columns(val, ("loss", "bits_per_byte")),
        "train": _thinned(train, points, config.batch.tokens),
        "events": _events(rows),
        "samples": _samples(rows),
        "summary": summary.as_dict() if summary else {},
        "peak_flops": _peak_flops(rows),
        "wait_share": _wait_share(rows),
        "command": repeat_command(config),
        "environment": _environment(folder, summary),
    }
    validations = [(row["step"], row["loss"]) for row in val if row.get("loss") is not None]
    fingerprint = next((row.get("dataset_fingerprint") for row in starts), None)
    known = folder.trained_on()
    text = config.track if known is None or known.usual_text else known.name
    rates = [(row["step"] - 1, row["lr_multiplier"]) for row in train if "lr_multiplier" in row]
    return RunData(folder, config, validations, fingerprint, text, rates, shown)


def _with_clocks(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Events carry no clock, so each is given that of the last row before it.

    The validation of step 0 comes after the first step, and sets no clock back.
    """
    where: dict[str, Any] = {"tokens": 0, "seconds": 0.0, "wall_seconds": 0.0}
    for row in rows:
        late = row["kind"] == "val" and row.get("step") == 0
        if all(key in row for key in where) and not late:
            where = {key: row[key] for key in where}
        yield {**where, **row}


def _latest_by_step(rows: Sequence[Row], kind: str) -> list[Row]:
    """One row a step, in order; after a rewind the later attempt counts."""
    found = {row["step"]: row for row in rows if row["kind"] == kind and "step" in row}
    return [found[step] for step in sorted(found)]


def _status(config: Config, rows: Sequence[Row], summary: Summary | None) -> str:
    if summary is None:
        return "unfinished" if rows else "not started"
    if summary.stopped_early:
        return "stopped early"
    if summary.steps >= config.steps:
        return "finished"
    return "at the target" if summary.reached_target else "ended"


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _columns(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[Any]]:
    digits = {"step": 0, "tokens": 0, "seconds": 3, "wall_seconds": 2} | dict.fromkeys(names, 5)
    return {name: [_rounded(row.get(name), to) for row in rows] for name, to in digits.items()}


def _thinned(rows: Sequence[Row], points: int, batch_tokens: int) -> dict[str, list[Any]]:
    """At most `points` rows: each the mean of a stretch of steps, placed at its last step."""
    size = -(-len(rows) // points) if rows else 1
    stretches = [rows[i : i + size] for i in range(0, len(rows), size)]
    sums = [sum(row.get("ms") or 0.0 for row in stretch) for stretch in stretches]
    return _columns([stretch[-1] for stretch in stretches], ()) | {
        "loss": [_mean(stretch, "loss") for stretch in stretches],
        "tokens_per_second": [
            round(1000 * batch_tokens * len(stretch) / ms, 1) if ms else None
            for stretch, ms in zip(stretches, sums, strict=True)
        ],
        "peak_share": [_mean(stretch, "peak_share") for stretch in stretches],
        "stretch": [size],
    }


def _wait_share(rows: Sequence[Row]) -> float | None:
    """Part of the training time spent waiting for data; each process counts its wait from zero."""
    waits, seconds = [0.0], 0.0
    for row in rows:
        if row["kind"] in ("start", "resume"):
            waits.append(0.0)
        elif row["kind"] == "train" and row.get("wait_seconds") is not None:
            waits[-1], seconds = float(row["wait_seconds"]), float(row["seconds"])
    return sum(waits) / seconds if seconds else None


def _peak_flops(rows: Sequence[Row]) -> float | None:
    """The median of the peaks measured beside the steps; older runs have one, of their start."""
    found = [row["peak_flops"] for row in rows if row.get("peak_flops")]
    return median(found) if found else None


def _mean(rows: Sequence[Row], name: str) -> float | None:
    known = [row[name] for row in rows if row.get(name) is not None]
    return round(sum(known) / len(known), 5) if known else None


def _events(rows: Sequence[Row]) -> list[dict[str, Any]]:
    clocks = ("kind", "step", "tokens", "seconds", "wall_seconds")
    found = []
    for row in rows:
        if row["kind"] not in CURVES:
            details = [
                f"{key} {value}"
                for key, value in row.items()
                if key not in (*clocks, "peak_flops") and not key.endswith("fingerprint")
            ]
            event = {key: row.get(key) for key in clocks}
            found.append(event | {"detail": ", ".join(details)})
    return found if len(found) <= MOST_EVENTS else found[:1] + found[1 - MOST_EVENTS :]


def _samples(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {"prompt": row.get("prompt", ""), "text": str(row.get("text", ""))[:SAMPLE_CHARACTERS]}
        for row in rows
        if row["kind"] == "sample"
    ][-MOST_SAMPLES:]


def _environment(folder: RunFolder, summary: Summary | None) -> dict[str, Any]:
    """What was recorded of the machine and the code, flattened; of a diff its length."""
    place = Environment.read(folder.environment)
    found = dict(flatten(place.recorded)) if place else {}
    diff = found.pop("git_diff", None)
    if place and place.git_commit:
        lines = len(diff.splitlines()) if diff else 0
        found["uncommitted changes"] = f"{lines} lines of diff" if lines else "none"
    stated = summary.as_dict() if summary else {}
    for key in ("device", "threads", "world_size", "torch", "dataset_fingerprint"):
        if key in stated and key not in found and f"libraries.{key}" not in found:
            found[key] = stated[key]
    return _text(folder) | {key: value for key, value in found.items() if value is not None}


def _text(folder: RunFolder) -> dict[str, Any]:
    """The text of a run and what was made smaller to fit it, where it is not the track's own."""
    known = folder.trained_on()
    if known is None or (known.usual_text and not known.shrunk):
        return {}
    shrunk = ", ".join(f"{key} {was:,} -> {now:,}" for key, (was, now) in known.shrunk.items())
    return {"text": known.told} | ({"shrunk_to_fit_it": shrunk} if shrunk else {})


def repeat_command(config: Config) -> str:
    """A command line that resolves to this very config, whatever file the recipe came from."""
    try:
        base = resolve(config.recipe, config.track).config
    except ConfigError:
        base = resolve("modern", "nano").config
    words = ["speedrun", "train", base.recipe, "--track", base.track]
    words += ["--seed", str(config.train.seed)]
    return shlex.join([*words, *override_words(base, config, but=(SEED,)).values()])


def schedules(config: Config, rates: Sequence[tuple[int, float]] = ()) -> dict[str, Any]:
    """Learning rate, Muon's momentum and window over the run, as [step, value].

    Of a schedule of a user's own those `rates` that were recorded: who looks at a page runs no code
    of a run's.
    """
    total = config.steps
    steps = sorted({round(i * total / SCHEDULE_POINTS) for i in range(SCHEDULE_POINTS + 1)})
    muon = config.optimizer.kind == "muon"
    if config.custom.schedule.use:
        points = [*rates[:: 1 + len(rates) // SCHEDULE_POINTS]]
    else:
        points = [(step, settings_at(config, step).learning_rate_multiplier) for step in steps]
    return {
        "lr": [(step, round(rate, 5)) for step, rate in points],
        "momentum": [(s, round(momentum_at(config, s), 5)) for s in steps] if muon else [],
        "window": _windows(config),
    }


def _windows(config: Config) -> list[tuple[int, int]]:
    """Each width in tokens with its first step, and the last step."""
    found: list[tuple[int, int]] = []
    step, last = 0, config.steps
    while step <= last:
        width = window_at(config, step)
        if width is None:
            return []
        found.append((step, width * config.window_unit))
        # It only grows, so the step where it does so next is searched by halves: runs are long.
        step = bisect_right(range(last + 1), width, step, key=lambda at: _window(config, at))
    return found if found[-1][0] == last else [*found, (last, found[-1][1])]


def _window(config: Config, step: int) -> int:
    return window_at(config, step) or 0
