"""What the paths on the command line mean: runs, races, ablations, or a folder of runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedrun.errors import ConfigError
from speedrun.train.run import RunFolder

RESULTS = ("race.json", "ablation.json")


@dataclass(frozen=True)
class Inputs:
    runs: tuple[RunFolder, ...]
    race: dict[str, Any] | None
    ablation: dict[str, Any] | None
    files: tuple[Path, ...]  # what to watch besides the runs


def read_inputs(paths: Sequence[Path]) -> Inputs:
    """Runs in the order given, each once; at most one race and one ablation."""
    runs: dict[Path, RunFolder] = {}
    results: dict[str, dict[str, Any]] = {}
    files: list[Path] = []

    def add(folder: Path) -> None:
        runs.setdefault(folder.resolve(), RunFolder(folder))

    for path in paths:
        if (path / "config.toml").is_file():
            add(path)
            continue
        for file in _result_files(path):
            kind = file.stem if file.name in RESULTS else ""
            found = _read_result(file)
            kind = str(found.get("kind") or kind)
            if kind in results:
                raise ConfigError(f"{file} is a second {kind}; a page shows one")
            results[kind] = found
            files.append(file)
            for place in _run_paths(found):
                if (file.parent / place / "config.toml").is_file():
                    add(file.parent / place)
        if path.is_dir() and not any((path / name).is_file() for name in RESULTS):
            inside = sorted(path.glob("*/config.toml"))
            # A race or an ablation under way has no result yet, but runs.
            inside = inside or sorted(path.glob("runs/*/config.toml"))
            if not inside:
                raise ConfigError(
                    f"{path} holds neither a run (config.toml), nor {' or '.join(RESULTS)}, nor "
                    "folders of runs; name a run folder"
                )
            for config in inside:
                add(config.parent)
    return Inputs(
        tuple(runs.values()), results.get("race"), results.get("ablation"), tuple(files)
    )  # fmt: skip


def _result_files(path: Path) -> list[Path]:
    if path.is_dir():
        return [path / name for name in RESULTS if (path / name).is_file()]
    if path.is_file() and path.suffix == ".json":
        return [path]
    raise ConfigError(
        f"{path} is not there or not of use; name a run folder, a race.json or an ablation.json"
    )


def _read_result(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    key = "effects" if isinstance(found, dict) and "effects" in found else "entries"
    if not isinstance(found, dict) or not isinstance(found.get(key), list):
        raise ConfigError(
            f"{file} is no result of a race or an ablation: it has no list of entries or effects"
        )
    needed = ("switch", "effect") if key == "effects" else ("recipe",)
    for index, row in enumerate(found[key]):
        for name in needed:
            if not isinstance(row, dict) or name not in row:
                raise ConfigError(f"{file}: {key}[{index}] has no {name!r}")
    found.setdefault("kind", "ablation" if key == "effects" else "race")
    return found


def _run_paths(found: dict[str, Any]) -> list[str]:
    rows = [*found.get("entries", []), *found.get("effects", [])]
    paths = [row["run"] for row in rows if isinstance(row.get("run"), str)]
    return [*paths, *(path for path in found.get("runs", []) if isinstance(path, str))]
