"""Runs side by side: which belong together, who reached the target when, what was set otherwise.

Runs on the same data whose configs differ only in seed, place and machine are one group: its seeds.
Times to the target are the first validation at or below it. Ratios are to the first group, by
Fieller's interval with Welch's degrees of freedom; a group in which a seed missed the target has no
mean to compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from speedrun.config.files import flatten
from speedrun.config.resolve import parse_override
from speedrun.config.schema import Config
from speedrun.report.page.run import RunData
from speedrun.report.text import value_text
from speedrun.science import stats

METRICS = ("tokens_to_target", "steps_to_target", "seconds_to_target", "wall_seconds_to_target")
NOT_THE_EXPERIMENT = ("recipe", "track", "train.seed", "train.device", "train.threads", "data.dir")
SHOWN = ("mean", "std", "low", "high", "ratio", "ratio_low", "ratio_high")
SHORT_LABEL = 2  # settings named in a label before it becomes a number


@dataclass(frozen=True, eq=False)
class Group:
    label: str
    config: Config
    dataset: str  # its fingerprint; empty while no run of the group has begun
    runs: tuple[RunData, ...]


def _settings(config: Config) -> dict[str, Any]:
    return {
        key: value for key, value in flatten(config.model_dump()) if key not in NOT_THE_EXPERIMENT
    }


def group_runs(
    runs: Sequence[RunData], changes: Mapping[str, Sequence[str]] | None = None
) -> list[Group]:
    """Runs by recipe, track, settings and data, in order of first appearance, with distinct labels.

    `changes` are an ablation's names for settings: groups that differ by them are called so. A run
    that has not begun has no dataset yet; it goes with the first run that is set alike.
    """
    keys = [f"{run.config.recipe} {run.config.track} {_settings(run.config)}" for run in runs]
    first_dataset: dict[str, str] = {}
    for key, run in zip(keys, runs, strict=True):
        if run.dataset_fingerprint:
            first_dataset.setdefault(key, run.dataset_fingerprint)
    members: dict[tuple[str, str], list[RunData]] = {}
    for key, run in zip(keys, runs, strict=True):
        dataset = run.dataset_fingerprint or first_dataset.get(key, "")
        members.setdefault((key, dataset), []).append(run)
    groups: list[Group] = []
    for (_, dataset), found in members.items():
        config = found[0].config
        group = Group(config.recipe or found[0].folder.path.name, config, dataset, tuple(found))
        same = [other for other in groups if other.config.recipe == config.recipe]
        label = group.label
        if same:
            name = _named_change(same[0], group, changes or {})
            label = name or f"{label} ({_what_differs(same[0], group, len(same) + 1)})"
        if any(other.label == label for other in groups):
            label += f" #{len(groups) + 1}"
        groups.append(replace(group, label=label))
    return groups


def _what_differs(first: Group, other: Group, number: int) -> str:
    before, after = _settings(first.config), _settings(other.config)
    changed = [f"{key}={value_text(value)}" for key, value in after.items() if before[key] != value]
    if first.config.track != other.config.track:
        changed.insert(0, other.config.track)
    if len(changed) > SHORT_LABEL:
        changed = [f"variant {number}"]
    if _on_other_data(first, other):
        folder = Path(other.config.data.dir).name
        changed.append(" ".join(filter(None, ("dataset", folder, other.dataset[:8]))))
    return ", ".join(changed)


def _on_other_data(first: Group, other: Group) -> bool:
    return bool(first.dataset and other.dataset) and first.dataset != other.dataset


def _named_change(first: Group, other: Group, changes: Mapping[str, Sequence[str]]) -> str:
    """What an ablation calls the difference between two groups; empty if it has no name for it."""
    if _on_other_data(first, other):
        return ""
    before, after = (
        {key: value_text(value) for key, value in _settings(group.config).items()}
        for group in (first, other)
    )
    changed = {key: text for key, text in after.items() if before[key] != text}
    for name, settings in changes.items():
        wanted = {key: value_text(value) for key, value in map(parse_override, settings)}
        if changed == {key: text for key, text in wanted.items() if before.get(key) != text}:
            return name if "=" in name else f"without {name}"
    return ""


def title_of(
    groups: Sequence[Group], race: Mapping[str, Any] | None, ablation: Mapping[str, Any] | None
) -> str:
    tracks = list(dict.fromkeys(group.config.track for group in groups if group.config.track))
    where = f" on {' and '.join(tracks)}" if tracks else ""
    if ablation is not None and race is None:
        return f"What matters in {ablation.get('recipe') or 'the recipe'}{where}"
    names = list((race or {}).get("recipes") or []) or [group.label for group in groups]
    if len(names) > 4:
        names = [*names[:3], f"{len(names) - 3} more"]
    text = ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else "".join(names)
    return f"{text or 'Nothing yet'}{where}"


def _entry(run: RunData, label: str, target: float | None) -> dict[str, Any]:
    """When a run first validated at or below the target; from its curve, so any target works."""
    val, batch = run.shown["val"], run.config.batch.tokens
    entry: dict[str, Any] = dict.fromkeys(METRICS)
    for index, loss in enumerate(val["loss"]):
        if target and loss is not None and loss <= target:
            entry["tokens_to_target"] = val["tokens"][index]
            entry["steps_to_target"] = val["tokens"][index] / batch
            entry["seconds_to_target"] = val["seconds"][index]
            entry["wall_seconds_to_target"] = val["wall_seconds"][index]
            break
    losses = [loss for loss in val["loss"] if loss is not None]
    final = losses[-1] if losses else None
    return {"recipe": label, "seed": run.config.train.seed, "val_loss": final} | entry


def race_rows(
    runs: Sequence[RunData],
    groups: Sequence[Group],
    race: Mapping[str, Any] | None,
    target: float | None,
) -> dict[str, Any] | None:
    """Per metric one row a recipe: its seeds, mean, interval, and ratio to the first recipe."""
    if race is not None:
        entries = [_with_steps(entry, runs) for entry in race["entries"]]
    else:
        entries = [_entry(run, group.label, target) for group in groups for run in group.runs]
    if not entries or not target:
        return None
    named = list((race or {}).get("recipes") or [])
    recipes = named or list(dict.fromkeys(entry["recipe"] for entry in entries))
    given = (race or {}).get("statistics") or {}
    shown: dict[str, Any] = {
        "target": target,
        "command": (race or {}).get("command"),
        "recipes": recipes,
        "groups": [_group_of(recipe, groups) for recipe in recipes],
        "metrics": {},
    }
    for metric in METRICS:
        rows = []
        for recipe in recipes:
            values = [entry.get(metric) for entry in entries if entry["recipe"] == recipe]
            first = [entry.get(metric) for entry in entries if entry["recipe"] == recipes[0]]
            row = {"values": values} | statistics(values, first)
            if row["reached"] == row["n"]:
                stated = given.get(recipe, {}).get(metric) or {}
                row |= {key: stated[key] for key in SHOWN if key in stated}
            rows.append(row)
        if any(value is not None for row in rows for value in row["values"]):
            shown["metrics"][metric] = rows
    shown["final"] = [
        {"values": losses} | asdict(stats.summarize(losses)) if losses else {"values": []}
        for losses in (
            [e["val_loss"] for e in entries if e["recipe"] == r and e.get("val_loss") is not None]
            for r in recipes
        )
    ]
    return shown


def statistics(values: Sequence[float | None], first: Sequence[float | None]) -> dict[str, Any]:
    """Mean, spread, interval and ratio to `first`; the seeds that missed the target are counted."""
    known = [float(value) for value in values if value is not None]
    found: dict[str, Any] = {"n": len(values), "reached": len(known)}
    if not known or len(known) < len(values):
        return found
    found |= asdict(stats.summarize(known)) | {"reached": len(known)}
    others = [float(value) for value in first if value is not None]
    if others and len(others) == len(first) and stats.mean(others) > 0:
        ratio = stats.ratio_of_means(known, others)
        found |= {"ratio": ratio.ratio, "ratio_low": ratio.low, "ratio_high": ratio.high}
    return found


def _with_steps(entry: Mapping[str, Any], runs: Sequence[RunData]) -> dict[str, Any]:
    """Steps from tokens where a race did not state them and the run is at hand."""
    found = dict(entry)
    tokens, place = found.get("tokens_to_target"), found.get("run")
    if found.get("steps_to_target") is None and tokens is not None and place:
        for run in runs:
            if Path(place).name == run.folder.path.name:
                found["steps_to_target"] = tokens / run.config.batch.tokens
    return found


def _group_of(recipe: str, groups: Sequence[Group]) -> int | None:
    for index, group in enumerate(groups):
        if recipe in (group.label, group.config.recipe) or Path(recipe).stem == group.config.recipe:
            return index
    return None


def config_differences(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Keys that some groups set differently, with every group's value; the data is one of them."""
    if len(groups) < 2:
        return []
    tables = [_settings(group.config) | {"track": group.config.track} for group in groups]
    keys = [key for key in tables[0] if len({repr(table[key]) for table in tables}) > 1]
    rows = [{"key": key, "values": [value_text(table[key]) for table in tables]} for key in keys]
    datasets = [group.dataset[:8] for group in groups]
    if len(set(datasets) - {""}) > 1:
        rows.append({"key": "dataset", "values": datasets})
    return rows
