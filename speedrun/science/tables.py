"""Results of races, ablations and the leaderboard as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from speedrun.report.text import print_table, size_text

UNITS = {"tokens_to_target": "tokens", "seconds_to_target": "s", "val_loss": "nats"}


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _interval(row: Mapping[str, Any], low: str, high: str, form: str) -> str:
    if row.get(low) is None or row.get(high) is None:
        return ""
    return f" [{row[low]:{form}}, {row[high]:{form}}]"


def _cell(row: Mapping[str, Any], form: str) -> str:
    if row["n"] < row["of"]:
        return f"reached by {row['n']} of {row['of']}"
    spread = "" if row.get("std") is None else f" +- {row['std']:{form}}"
    return f"{row['mean']:{form}}{spread}{_interval(row, 'low', 'high', form)}"


def _ratio(row: Mapping[str, Any]) -> str:
    if "ratio" not in row:
        return "-"
    return f"{row['ratio']:.3f}{_interval(row, 'ratio_low', 'ratio_high', '.3f')}"


def print_race(result: Mapping[str, Any]) -> None:
    print(
        f"\nto a validation loss of {result['target']} on {result['track']}, {result['seeds']} "
        f"seeds: mean +- standard deviation [95% interval]; ratios to {result['recipes'][0]}"
    )
    rows, costs = [], []
    for recipe in result["recipes"]:
        table = result["statistics"][recipe]
        params = next(e["params"] for e in result["entries"] if e["recipe"] == recipe)
        memory = table["peak_memory_bytes"]
        rows.append((recipe, _cell(table["tokens_to_target"], ",.0f"),
                     _ratio(table["tokens_to_target"]), _cell(table["steps_to_target"], ",.0f"),
                     _cell(table["val_loss"], ".4f")))  # fmt: skip
        costs.append((recipe, _cell(table["seconds_to_target"], ".1f"),
                      _ratio(table["seconds_to_target"]),
                      _cell(table["wall_seconds_to_target"], ".1f"),
                      f"{params:,}", size_text(memory["mean"])))  # fmt: skip
    print_table(("recipe", "tokens", "ratio of tokens", "steps", "last loss"), rows)
    print()
    print_table(
        ("recipe", "training seconds", "ratio of seconds", "wall seconds", "parameters", "memory"),
        costs,
    )


def print_ablation(result: Mapping[str, Any]) -> None:
    print(
        f"\n{result['recipe']} on {result['track']}, {result['seeds']} seeds: effect of each "
        "switch (switched - recipe; above 0: the technique helped)"
    )
    for metric, unit in UNITS.items():
        rows = [
            (
                row["switch"],
                f"{_number(row['effect'], '+,.4f' if metric == 'val_loss' else '+,.0f')} {unit}"
                + _interval(row, "low", "high", "+,.4f" if metric == "val_loss" else "+,.0f"),
                _number(row["p"], ".3g"),
                _number(row["p_holm"], ".3g"),
                "decided" if row["decided"] else _more(row),
            )
            for row in result["effects"]
            if row["metric"] == metric
        ]
        print_table((f"switch: {metric}", "effect [95% interval]", "p", "p (Holm)", ""), rows)
        print()


def _more(row: Mapping[str, Any]) -> str:
    if row["effect"] is None:
        return f"{row['n']} of {row['of']} pairs have it"
    more = row["more_seeds"]
    return "undecided" if more is None else f"undecided: about {more} more seeds"


def print_leaderboard(entries: Sequence[Mapping[str, Any]]) -> None:
    if not entries:
        print("the leaderboard is empty: add runs with `speedrun submit RUN...`")
        return
    print_table(
        ("track", "recipe", "seconds", "tokens", "steps", "mean loss", "n", "p", "machine", "date"),
        [
            (e["track"], e["recipe"], f"{e['train_seconds']:.1f}", f"{e['tokens']:,}", e["steps"],
             f"{e['mean']:.4f}", e["n"], f"{e['p']:.2g}", e["machine"], e["date"])
            for e in entries
        ],
    )  # fmt: skip
