"""The page: run folders and results become one JSON object, which is put into the template."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from speedrun.config.own_code import own_code_text
from speedrun.files import finite
from speedrun.report.page.bundle import bundle
from speedrun.report.page.compare import (
    Group,
    config_differences,
    group_runs,
    names_of_changes,
    race_rows,
    title_of,
)
from speedrun.report.page.mask import mask_frames
from speedrun.report.page.plans import planned
from speedrun.report.page.run import read_run, schedules
from speedrun.science import published
from speedrun.science.results import Ablation, Race, Tuning
from speedrun.science.tune import changed_nothing
from speedrun.train.run import RunFolder

# A page stays far below 5 MB: this many points of training loss in all, in five columns.
POINTS_IN_ALL = 24_000


def page_data(
    runs: Sequence[RunFolder],
    race: Race | None = None,
    ablation: Ablation | None = None,
    tuning: Tuning | None = None,
    *,
    live: bool = False,
) -> dict[str, Any]:
    """What the page shows, as plain data; NaN and infinity become null."""
    points = max(40, min(400, POINTS_IN_ALL // max(1, len(runs))))
    found = [read_run(folder, points) for folder in runs]
    groups = group_runs(found, names_of_changes(ablation, tuning))
    group_of = {run.folder: i for i, group in enumerate(groups) for run in group.runs}
    targets = [race.target if race else None, *(run.config.train.target for run in found)]
    target = next(filter(None, targets), None)
    unused = {"kind", "dataset_fingerprint", "runs", "made", "losses", "jobs", "stopped", "seconds"}
    data = {
        "title": title_of(groups, race, ablation, tuning),
        "live": live,
        "target": target,
        "groups": [_group(group) for group in groups],
        "runs": [run.shown | {"group": group_of[run.folder]} for run in found],
        "raced": race is not None,
        "race": race_rows(found, groups, race, target),
        "ablation": ablation.model_dump(exclude=unused) if ablation else None,
        "tuning": _tuning(tuning) if tuning else None,
        "published": _published(groups),
        "diff": config_differences(groups),
        "masks": mask_frames(groups),
        "plans": planned(groups),
    }
    plain: dict[str, Any] = finite(data)
    return plain


def build_page(
    runs: Sequence[RunFolder],
    race: Race | None = None,
    ablation: Ablation | None = None,
    tuning: Tuning | None = None,
) -> str:
    return render(page_data(runs, race, ablation, tuning))


def render(data: Mapping[str, Any]) -> str:
    """The template with data, styles and scripts poured in."""
    static = files("speedrun.report.page") / "static"
    page = (static / "page.html").read_text(encoding="utf-8")
    # No character of the data can end its script element or open another.
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": html.escape(data["title"], quote=False),
        "connect": "'self'" if data["live"] else "'none'",
        "style": (static / "page.css").read_text(encoding="utf-8"),
        "script": bundle(static, "page"),
        "data": embedded,
    }
    # One pass, so that nothing put in is searched for marks again.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], page)


def _group(group: Group) -> dict[str, Any]:
    config, optimizer = group.config, group.config.optimizer
    return {
        "label": group.label,
        "recipe": config.recipe,
        "track": config.track,
        "steps": config.steps,
        "batch_tokens": config.batch.tokens,
        "validation_every": config.validation.every,
        "optimizer": optimizer.hidden.use if optimizer.kind == "own" else optimizer.kind,
        "own_code": own_code_text(config),
        "schedules": schedules(config, group.runs[0].rates),
    }


def _tuning(found: Tuning) -> dict[str, Any]:
    keys = ("kind", "dataset_fingerprint", "finalists", "jobs", "stated", "track_hash")
    unused: Any = dict.fromkeys(keys, True)
    unused["trials"] = {"__all__": {"runs"}}
    edges = () if changed_nothing(found) else found.edges  # no range is too narrow then
    return found.model_dump(exclude=unused) | {"edges": edges}


def _published(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """For groups on a record's own track: its curve, and how far each run is from it."""
    shown = []
    for index, group in enumerate(groups):
        record = published.record_of(group.config.recipe, group.config.track)
        if record is None:
            continue
        curve = published.curves()[record]
        found: dict[str, Any] = {
            "group": index,
            "record": record,
            "changed": published.set_otherwise(group.config, record),
            "steps": curve.steps,
            "borrowed": published.SPREAD_OF.get(record),
            "points": [_point(record, point) for point in curve.points],
            "runs": [],
        }
        for run in group.runs:
            rows = [vars(row) for row in published.compare(record, run.validations)]
            found["runs"].append({"name": run.shown["name"], "rows": rows})
        shown.append(found)
    return shown


def _point(record: int, point: published.Point) -> dict[str, Any]:
    tokens, spread = point.step * published.BATCH_TOKENS, published.spread_at(record, point.step)
    return vars(point) | {"tokens": tokens, "std": spread}
