"""From run folders and results to the page: data gathered, then poured into the template."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from speedrun.report.page.compare import (
    Group,
    config_differences,
    group_runs,
    race_rows,
    title_of,
)
from speedrun.report.page.mask import mask_frames
from speedrun.report.page.run import RunData, read_run, schedules
from speedrun.science import published
from speedrun.train.run import RunFolder

STYLES = ("page.css",)
SCRIPTS = ("base.js", "charts.js", "figures.js", "parts.js", "results.js", "details.js", "page.js")
# A page stays far below 5 MB: this many points of training loss in all, in five columns.
POINTS_IN_ALL = 24_000


def page_data(
    runs: Sequence[RunFolder],
    race: Mapping[str, Any] | None = None,
    ablation: Mapping[str, Any] | None = None,
    *,
    live: bool = False,
) -> dict[str, Any]:
    """What the page shows, as plain data; NaN and infinity become null."""
    points = max(40, min(400, POINTS_IN_ALL // max(1, len(runs))))
    found = [read_run(folder, points) for folder in runs]
    groups = group_runs(found, (ablation or {}).get("settings"))
    targets = [run.config.train.target for run in found if run.config.train.target]
    target = (race or {}).get("target") or (targets[0] if targets else None)
    data = {
        "title": title_of(groups, race, ablation),
        "live": live,
        "target": target,
        "groups": [_group(group) for group in groups],
        "runs": [run.shown | {"group": _index(groups, run)} for run in found],
        "raced": race is not None,
        "race": race_rows(found, groups, race, target),
        "ablation": _ablation(ablation),
        "published": _published(groups),
        "diff": config_differences(groups),
        "masks": mask_frames(groups),
    }
    plain: dict[str, Any] = finite(data)
    return plain


def build_page(
    runs: Sequence[RunFolder],
    race: Mapping[str, Any] | None = None,
    ablation: Mapping[str, Any] | None = None,
    *,
    live: bool = False,
) -> str:
    """The whole page as text."""
    return render(page_data(runs, race, ablation, live=live))


def render(data: Mapping[str, Any]) -> str:
    static = files("speedrun.report.page") / "static"

    def joined(names: Sequence[str]) -> str:
        return "\n".join((static / name).read_text(encoding="utf-8") for name in names)

    page = (static / "page.html").read_text(encoding="utf-8")
    # No character of the data can end its script element or open another.
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    title = str(data["title"]).replace("&", "&amp;").replace("<", "&lt;")
    parts = {
        "title": title,
        "connect": "'self'" if data["live"] else "'none'",
        "style": joined(STYLES),
        "script": joined(SCRIPTS),
        "data": embedded,
    }
    # One pass, so that nothing put in is searched for marks again.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], page)


def finite(value: Any) -> Any:
    """JSON has no NaN: null stands for what is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def _index(groups: Sequence[Group], run: RunData) -> int:
    return next(i for i, group in enumerate(groups) if run in group.runs)


def _group(group: Group) -> dict[str, Any]:
    config = group.config
    return {
        "label": group.label,
        "recipe": config.recipe,
        "track": config.track,
        "steps": config.steps,
        "batch_tokens": config.batch.tokens,
        "validation_every": config.validation.every,
        "optimizer": config.optimizer.kind,
        "schedules": schedules(config),
    }


def _ablation(ablation: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if ablation is None:
        return None
    keys = ("recipe", "track", "seeds", "command", "alpha", "settings")
    effects = [{"metric": "val_loss"} | dict(effect) for effect in ablation["effects"]]
    return {key: ablation.get(key) for key in keys} | {"effects": effects}


def _published(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """For groups on a record's own track: its curve, and how far each run is from it."""
    shown = []
    for index, group in enumerate(groups):
        record = published.record_of(group.config.recipe, group.config.track)
        if record is None:
            continue
        curve = published.curves()[record]
        shown.append(
            {
                "group": index,
                "record": record,
                "changed": published.set_otherwise(group.config, record),
                "steps": curve.steps,
                "borrowed": published.SPREAD_OF.get(record),
                "points": [
                    {
                        "step": point.step,
                        "tokens": point.step * published.BATCH_TOKENS,
                        "seconds": point.seconds,
                        "mean": point.mean,
                        "std": published.spread_at(record, point.step),
                        "n": point.n,
                    }
                    for point in curve.points
                ],
                "runs": [
                    {
                        "name": run.shown["name"],
                        "rows": [vars(row) for row in published.compare(record, run.validations)],
                    }
                    for run in group.runs
                ],
            }
        )
    return shown
