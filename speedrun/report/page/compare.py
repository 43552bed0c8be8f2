"""Runs side by side: which belong together, who reached the target when, what was set otherwise.

Runs of one recipe and track that are the same experiment but for the seed, on the same data, are
one group. Times to the target are where the validations cross it (`train/crossing.py`); what is
computed from them is `science/compare.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedrun.config.experiment import SEED, differences, experiment, experiment_hash
from speedrun.config.resolve import parse_override, toml_text
from speedrun.config.schema import Config
from speedrun.files import finite
from speedrun.report.page.run import RunData
from speedrun.science.compare import TO_TARGET, Entry, Row, comparable
from speedrun.science.results import Ablation, Race, Tuning
from speedrun.train.crossing import Look, crossing

SHORT_LABEL = 2  # settings named in a label before it becomes a number


@dataclass(eq=False)
class Group:
    label: str
    config: Config
    dataset: str  # its fingerprint; empty while no run of the group has begun
    runs: tuple[RunData, ...]


def names_of_changes(
    ablation: Ablation | None, tuning: Tuning | None
) -> dict[str, tuple[str, ...]]:
    """What an ablation or a tuning calls the settings in which its runs differ from the recipe."""
    names: dict[str, tuple[str, ...]] = {}
    if ablation is not None:
        for name, settings in ablation.settings.items():
            names[name if "=" in name else f"without {name}"] = settings
    for trial in tuning.trials if tuning else ():
        values = trial.values.items()
        names[f"trial {trial.number}"] = tuple(f"{key}={toml_text(each)}" for key, each in values)
    return names


def group_runs(runs: Sequence[RunData], changes: Mapping[str, Sequence[str]]) -> list[Group]:
    """Runs by recipe, track, settings and data, in order of first appearance, with distinct labels.

    `changes` are names for settings (`names_of_changes`): groups that differ from the first by them
    are called so. A run that has not begun has no dataset yet; it goes with the first run that is
    set alike.
    """
    keys = [
        f"{run.config.recipe} {run.config.track} {experiment_hash(run.config, but=(SEED,))}"
        for run in runs
    ]
    known = [(key, run.dataset_fingerprint) for key, run in zip(keys, runs, strict=True)]
    first_dataset = {key: dataset for key, dataset in reversed(known) if dataset}
    members: dict[tuple[str, str], list[RunData]] = {}
    for key, run in zip(keys, runs, strict=True):
        dataset = run.dataset_fingerprint or first_dataset.get(key, "")
        members.setdefault((key, dataset), []).append(run)
    groups: list[Group] = []
    for (_, dataset), found in members.items():
        config = found[0].config
        label = config.recipe or found[0].folder.path.name
        group = Group(label, config, dataset, tuple(found))
        same = [other for other in groups if other.config.recipe == config.recipe]
        if same:
            name = _named_change(same[0], group, changes)
            group.label = name or f"{label} ({_what_differs(same[0], group, len(same) + 1)})"
        if any(other.label == group.label for other in groups):
            group.label += f" #{len(groups) + 1}"
        groups.append(group)
    return groups


def _changed(first: Group, other: Group) -> dict[str, str]:
    """Keys that `other` sets otherwise, with its values as text."""
    found = differences(first.config, other.config, but=(SEED,))
    return {key: toml_text(value) for key, _, value in found}


def _what_differs(first: Group, other: Group, number: int) -> str:
    changed = [f"{key}={text}" for key, text in _changed(first, other).items()]
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
    """What the difference between two groups is called; empty if it has no name."""
    if _on_other_data(first, other):
        return ""
    before = {key: toml_text(value) for key, value in experiment(first.config).items()}
    changed = _changed(first, other)
    now = experiment(other.config)
    for name, settings in changes.items():
        wanted = {key: toml_text(value) for key, value in map(parse_override, settings)}
        # Of code that is named otherwise hash and arguments change with it; the name must fit.
        tables = tuple(key.removesuffix("use") for key in wanted if key.endswith(".use"))
        fits = all(
            toml_text(now.get(f"{table}use") or "") == wanted[f"{table}use"] for table in tables
        )
        rest = {key: text for key, text in changed.items() if not key.startswith(tables)}
        alike = rest == {
            key: text
            for key, text in wanted.items()
            if before.get(key) != text and not key.startswith(tables)
        }
        if alike and fits:
            return name
    return ""


def title_of(
    groups: Sequence[Group], race: Race | None, ablation: Ablation | None, tuning: Tuning | None
) -> str:
    texts = list(dict.fromkeys(run.text for group in groups for run in group.runs if run.text))
    where = f" on {' and '.join(texts)}" if texts else ""
    if ablation is not None and race is None:
        return f"What matters in {ablation.recipe or 'the recipe'}{where}"
    if tuning is not None and race is None:
        return f"{tuning.recipe} tuned on {tuning.track}"
    names = [*(race.recipes if race else ())] or [group.label for group in groups]
    if len(names) > 4:
        names = [*names[:3], f"{len(names) - 3} more"]
    text = ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else "".join(names)
    return f"{text or 'Nothing yet'}{where}"


def _entry(run: RunData, label: str, target: float) -> Entry:
    """What a race would have found of a run: where its validations cross the target."""
    val, tokens = run.shown["val"], run.config.batch.tokens
    found: dict[str, Any] = {"val_loss": val["loss"][-1] if val["loss"] else None}
    before = None
    clocks = (val[name] for name in ("step", "loss", "seconds", "wall_seconds"))
    for step, loss, *times in zip(*clocks, strict=True):
        look = Look(step, loss, *(math.nan if time is None else time for time in times))
        if loss is not None and loss <= target:
            there = crossing(before, look, target)
            found |= {
                "steps_to_target": there.steps, "tokens_to_target": there.tokens(tokens),
                "cell_steps": there.cell,
            }  # fmt: skip
            found |= finite({"seconds_to_target": there.seconds,
                             "wall_seconds_to_target": there.wall_seconds})  # fmt: skip
            break
        before = look
    return Entry(recipe=label, seed=run.config.train.seed, **found)


def race_rows(
    runs: Sequence[RunData], groups: Sequence[Group], race: Race | None, target: float | None
) -> dict[str, Any] | None:
    """Per metric one row a recipe: its seeds, mean, interval, and ratio to the first recipe."""
    if not target:
        return None
    if race is None:  # runs that no race has made are compared as if one had
        entries = [_entry(run, group.label, target) for group in groups for run in group.runs]
    else:
        entries = [_with_steps(entry, runs) for entry in race.entries]
    if not entries:
        return None
    race = race or Race(entries=(), jobs=max(run.config.machine.jobs for run in runs))
    race = race.model_copy(update={"entries": tuple(entries)})
    table = race.statistics()

    def rows(metric: str) -> list[dict[str, Any]]:
        return [_shown(race, recipe, metric, table[recipe][metric]) for recipe in race.order]

    measured = comparable(TO_TARGET, race.jobs)
    reached = [m for m in measured if any(table[recipe][m].n for recipe in race.order)]
    return {
        "target": target,
        "command": race.command,
        "recipes": race.order,
        "groups": [_group_of(recipe, groups) for recipe in race.order],
        "metrics": {metric: rows(metric) for metric in reached},
        "final": rows("val_loss"),
        "test": rows("test_loss") if any(entry.test_loss for entry in entries) else None,
        "finished": race.finished,
        "verdicts": race.verdicts(),
    }


def _shown(race: Race, recipe: str, metric: str, row: Row) -> dict[str, Any]:
    """As the page's scripts call it: `reached` of `n` seeds."""
    values = [getattr(entry, metric) for entry in race.entries if entry.recipe == recipe]
    found = row.as_dict()
    return {"values": values, "n": found.pop("of"), "reached": found.pop("n")} | found


def _with_steps(entry: Entry, runs: Sequence[RunData]) -> Entry:
    """Steps from tokens where a race did not state them and the run is at hand."""
    if entry.steps_to_target is None and entry.tokens_to_target is not None and entry.run:
        for run in runs:
            if Path(entry.run).name == run.folder.path.name:
                steps = entry.tokens_to_target / run.config.batch.tokens
                return entry.model_copy(update={"steps_to_target": steps})
    return entry


def _group_of(recipe: str, groups: Sequence[Group]) -> int | None:
    for index, group in enumerate(groups):
        if recipe in (group.label, group.config.recipe) or Path(recipe).stem == group.config.recipe:
            return index
    return None


def config_differences(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Keys that some groups set differently, with every group's value; the data is one of them."""
    if len(groups) < 2:
        return []
    tables = [
        experiment(group.config, but=(SEED,)) | {"track": group.config.track} for group in groups
    ]
    keys = dict.fromkeys(key for table in tables for key in table)
    texts = {key: [toml_text(table.get(key)) for table in tables] for key in keys}
    rows = [{"key": key, "values": found} for key, found in texts.items() if len(set(found)) > 1]
    datasets = [group.dataset[:8] for group in groups]
    if len(set(datasets) - {""}) > 1:
        rows.append({"key": "dataset", "values": datasets})
    return rows
