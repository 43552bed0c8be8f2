"""`speedrun compare`: what differs between runs, what came of it, and what would decide it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from speedrun.config.own_code import own_code, own_code_text
from speedrun.files import finite
from speedrun.science.compare import Row
from speedrun.science.side import Side
from speedrun.science.sides import Comparison, Result, compare_runs
from speedrun.terminal.console import print_table, size_text

TITLES = {
    "val_loss": "last validation loss",
    "loss_at_common": "validation loss at",
    "val_bpb": "bits per byte",
    "tokens_to_target": "tokens to the target",
    "seconds_to_target": "seconds to the target",
    "tokens": "tokens trained on",
    "train_seconds": "seconds of training",
    "tokens_per_second": "tokens a second",
    "peak_memory_bytes": "peak memory",
    "params": "parameters",
}
FORMS = dict.fromkeys(("val_loss", "loss_at_common", "val_bpb"), ".4f") | dict.fromkeys(
    ("seconds_to_target", "train_seconds"), ",.1f"
)
SHOWN_KEYS = 40  # in the terminal; --json has all


def compare_command(paths: Sequence[Path], as_json: bool) -> None:
    found = compare_runs(paths)
    if as_json:
        print(json.dumps(finite(as_dict(found)), allow_nan=False))
        return
    for side in found.sides:
        print(_headline(side))
    names = [side.name for side in found.sides]
    _print_differences("what was set otherwise", names, found.experiment)
    _print_differences("data, code and machine", names, found.place)
    if not found.experiment and not found.place:
        print("\nnothing that was recorded differs")
    print()
    _print_results(found.results, names)
    for title, lines in (("do not compare", found.forbidden), ("note", found.notes)):
        for line in lines:
            print(f"{title}: {line}")
    if found.command:
        print(f"to decide it: {found.command}")


def _headline(side: Side) -> str:
    config, runs = side.config, side.runs
    text = runs[0].folder.told_text(config.track)
    paths = ", ".join(str(run.folder.path) for run in runs)
    seeds = ", ".join(map(str, side.seeds))
    several = "s" if len(runs) > 1 else ""
    own = f"; own code: {used}" if (used := own_code_text(config)) else ""
    return f"{side.name}: {config.recipe} on {text}, seed{several} {seeds}: {paths}{own}"


def _print_differences(
    title: str, names: Sequence[str], found: Mapping[str, Sequence[str]]
) -> None:
    if not found:
        return
    print()
    rows = [(key, *values) for key, values in found.items()]
    print_table((title, *names), rows[:SHOWN_KEYS])
    if len(rows) > SHOWN_KEYS:
        print(f"and {len(rows) - SHOWN_KEYS} more; --json has all")


def _print_results(results: Sequence[Result], names: Sequence[str]) -> None:
    first, *others = names
    header = ["result", *names]
    for name in others:
        header += [f"{name} - {first}", f"{name} / {first}"]
    rows = []
    for one in results:
        title = f"{TITLES[one.metric]} {one.at}".strip()
        cells = [title, *(_mean(one.metric, row) for row in one.rows)]
        for row, difference in zip(one.rows[1:], one.differences[1:], strict=True):
            cells += [_difference(one.metric, difference), _ratio(row)]
        rows.append(cells)
    print_table(header, rows)


def _number(metric: str, value: float, sign: str = "") -> str:
    if metric == "peak_memory_bytes":
        mark = ("-" if value < 0 else "+") if sign else ""
        return f"{mark}{size_text(abs(value))}"
    return format(value, f"{sign}{FORMS.get(metric, ',.0f')}")


def _mean(metric: str, row: Row) -> str:
    if row.mean is None:
        return "-" if row.n == 0 else f"{row.n} of {row.of} have it"
    spread = "" if not row.std else f" +- {_number(metric, row.std)}"
    return f"{_number(metric, row.mean)}{spread}"


def _difference(metric: str, found: Mapping[str, float | None] | None) -> str:
    if found is None:
        return "-"
    mean, low, high = found["mean"], found.get("low"), found.get("high")
    assert mean is not None
    text = _number(metric, mean, "+")
    if low is not None and high is not None:
        text += f" [{_number(metric, low, '+')}, {_number(metric, high, '+')}]"
    return text if found.get("p") is None else f"{text}, p {found['p']:.2g}"


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return "-"
    text = f"{row.ratio:.3f}"
    if row.ratio_low is None or row.ratio_high is None:
        return text
    ends = f"{row.ratio_low:.3f}", f"{row.ratio_high:.3f}"
    return text if set(ends) == {text} else f"{text} [{', '.join(ends)}]"


def as_dict(found: Comparison) -> dict[str, Any]:
    names = [side.name for side in found.sides]

    def by_side(values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(names, values, strict=True))

    return {
        "sides": {
            side.name: {
                "recipe": side.config.recipe,
                "track": side.config.track,
                "seeds": side.seeds,
                "own_code": own_code(side.config),
                "runs": [str(run.folder.path) for run in side.runs],
            }
            for side in found.sides
        },
        "experiment": {key: by_side(values) for key, values in found.experiment.items()},
        "place": {key: by_side(values) for key, values in found.place.items()},
        "results": {
            one.metric: {
                "at": one.at or None,
                "values": by_side(one.values),
                "means": by_side([asdict(row) for row in one.rows]),
                "differences": by_side(one.differences),
            }
            for one in found.results
        },
        "comparable": dict(found.kinds),
        "do_not_compare": found.forbidden,
        "notes": found.notes,
        "command": found.command or None,
    }
