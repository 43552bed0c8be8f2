"""One run folder as the page sees it: thinned curves, events, samples, where and how it ran."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speedrun.config.files import flatten
from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.errors import ConfigError, RunError
from speedrun.report.text import value_text
from speedrun.train.run import RunFolder

MOST_EVENTS = 200
MOST_SAMPLES = 4
SAMPLE_CHARACTERS = 3000
SCHEDULE_POINTS = 200
CURVES = ("train", "val", "sample")
Row = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class RunData:
    folder: RunFolder
    config: Config
    summary: Row
    validations: list[tuple[int, float]]
    dataset_fingerprint: str | None
    shown: dict[str, Any]


def read_run(folder: RunFolder, points: int) -> RunData:
    """Read a run, finished or not; `points` limits its training curve."""
    config = folder.load_config()
    rows = list(_with_clocks(folder.read_metrics() if folder.metrics.exists() else []))
    summary = _read_json(folder.summary)
    train = _latest_by_step(rows, "train")
    val = _latest_by_step(rows, "val")
    starts = [row for row in rows if row["kind"] in ("start", "resume")]
    shown = {
        "name": folder.path.name,
        "path": str(folder.path),
        "seed": config.train.seed,
        "status": _status(config, rows, summary),
        "steps": int(
            summary.get("steps") or max((row["step"] for row in (*train, *val)), default=0)
        ),
        "total_steps": config.steps,
        "batch_tokens": config.batch.tokens,
        "val": _columns(val, ("loss", "bits_per_byte")),
        "train": _thinned(train, points, config.batch.tokens),
        "events": _events(rows),
        "samples": _samples(rows),
        "summary": dict(summary),
        "peak_flops": next((row["peak_flops"] for row in starts if row.get("peak_flops")), None),
        "wait_share": _wait_share(rows),
        "command": repeat_command(config),
        "environment": _environment(folder, summary),
    }
    validations = [(row["step"], row["loss"]) for row in val if row["loss"] is not None]
    fingerprint = next((row.get("dataset_fingerprint") for row in starts), None)
    return RunData(folder, config, summary, validations, fingerprint, shown)


def _read_json(path: Any) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read as JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def _with_clocks(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Events carry no clock, so each is given that of the last row before it."""
    where: dict[str, Any] = {"tokens": 0, "seconds": 0.0, "wall_seconds": 0.0}
    for row in rows:
        if "wall_seconds" in row:
            where = {key: row[key] for key in where}
        yield {**row, **where}


def _latest_by_step(rows: Sequence[Row], kind: str) -> list[Row]:
    """One row a step, in order; after a rewind the later attempt counts."""
    found = {row["step"]: row for row in rows if row["kind"] == kind}
    return [found[step] for step in sorted(found)]


def _status(config: Config, rows: Sequence[Row], summary: Row) -> str:
    if not summary:
        return "unfinished" if rows else "not started"
    if summary.get("stopped_early"):
        return "stopped early"
    done = int(summary.get("steps", 0)) >= config.steps
    return "finished" if done else "at the target" if summary.get("reached_target") else "ended"


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _columns(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {
        "step": [row["step"] for row in rows],
        "tokens": [row["tokens"] for row in rows],
        "seconds": [_rounded(row["seconds"], 3) for row in rows],
        "wall_seconds": [_rounded(row["wall_seconds"], 2) for row in rows],
    }
    return found | {name: [_rounded(row.get(name), 5) for row in rows] for name in names}


def _thinned(rows: Sequence[Row], points: int, batch_tokens: int) -> dict[str, list[Any]]:
    """At most `points` rows: each the mean of a stretch of steps, placed at its last step."""
    size = -(-len(rows) // points) if rows else 1
    stretches = [rows[i : i + size] for i in range(0, len(rows), size)]
    found = _columns([stretch[-1] for stretch in stretches], ())
    found["loss"] = [_mean(row["loss"] for row in stretch) for stretch in stretches]
    found["tokens_per_second"] = []
    for stretch in stretches:
        ms = sum(row.get("ms") or 0.0 for row in stretch)
        found["tokens_per_second"].append(
            round(1000 * batch_tokens * len(stretch) / ms, 1) if ms else None
        )
    found["peak_share"] = [_mean(row.get("peak_share") for row in stretch) for stretch in stretches]
    found["stretch"] = [size]
    return found


def _wait_share(rows: Sequence[Row]) -> float | None:
    """Part of the training time spent waiting for data; each process counts its wait from zero."""
    waits, seconds = [0.0], 0.0
    for row in rows:
        if row["kind"] in ("start", "resume"):
            waits.append(0.0)
        elif row["kind"] == "train" and row.get("wait_seconds") is not None:
            waits[-1], seconds = float(row["wait_seconds"]), float(row["seconds"])
    return sum(waits) / seconds if seconds else None


def _mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 5) if known else None


def _events(rows: Sequence[Row]) -> list[dict[str, Any]]:
    clocks = ("kind", "step", "tokens", "seconds", "wall_seconds")
    found = []
    for row in rows:
        if row["kind"] in CURVES:
            continue
        extra = {
            key: value
            for key, value in row.items()
            if key not in clocks and not key.endswith("fingerprint") and key != "peak_flops"
        }
        found.append(
            {key: row.get(key) for key in clocks}
            | {"detail": ", ".join(f"{key} {value}" for key, value in extra.items())}
        )
    return found if len(found) <= MOST_EVENTS else found[:1] + found[1 - MOST_EVENTS :]


def _samples(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {"prompt": row.get("prompt", ""), "text": str(row.get("text", ""))[:SAMPLE_CHARACTERS]}
        for row in rows
        if row["kind"] == "sample"
    ][-MOST_SAMPLES:]


def _environment(folder: RunFolder, summary: Row) -> dict[str, Any]:
    """What was recorded of the machine and the code, flattened; a diff is told by its length."""
    recorded = _read_json(folder.path / "environment.json")
    found = dict(flatten(recorded))
    diff = found.pop("git_diff", None)
    if recorded.get("git_commit"):
        lines = len(diff.splitlines()) if diff else 0
        found["uncommitted changes"] = f"{lines} lines of diff" if lines else "none"
    for key in ("device", "threads", "world_size", "torch", "dataset_fingerprint"):
        if key in summary and key not in found and f"libraries.{key}" not in found:
            found[key] = summary[key]
    return {key: value for key, value in found.items() if value is not None}


def repeat_command(config: Config) -> str:
    """A command line that resolves to this very config, whatever file the recipe came from."""
    recipe, track = config.recipe, config.track
    try:
        base = resolve(recipe, track).config
    except ConfigError:
        recipe, track = "modern", "nano"
        base = resolve(recipe, track).config
    stated = dict(flatten(base.model_dump()))
    words = ["speedrun", "train", recipe, "--track", track, "--seed", str(config.train.seed)]
    for key, value in flatten(config.model_dump()):
        if key not in ("recipe", "track", "train.seed") and stated[key] != value:
            words.append(f"{key}={value_text(value)}")
    return shlex.join(words)


def schedules(config: Config) -> dict[str, Any]:
    """Learning rate, Muon's momentum and window over the run: functions of the step alone."""
    from speedrun.model.window import window_at
    from speedrun.train.setup import learning_rate_multiplier, momentum_at

    total = config.steps
    steps = sorted({round(i * total / SCHEDULE_POINTS) for i in range(SCHEDULE_POINTS + 1)})
    muon = config.optimizer.kind == "muon"
    unit = 128 if config.attention.window == "blocks" else 1
    window: list[tuple[int, int]] = []
    for step in range(total + 1) if config.attention.window != "none" else ():
        width = (window_at(config, step) or 0) * unit
        if not window or window[-1][1] != width or step == total:
            window.append((step, width))
    return {
        "lr": [(step, round(learning_rate_multiplier(config, step), 5)) for step in steps],
        "momentum": [(s, round(momentum_at(config, s), 5)) for s in steps] if muon else [],
        "window": window,
    }
