"""What the paths on the command line mean: runs, races, ablations, tunings, or a folder of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedrun.errors import ConfigError
from speedrun.science.results import Ablation, Race, Tuning, read_result
from speedrun.train.run import RunFolder

RESULTS = ("race.json", "ablation.json", "tune.json")


@dataclass(frozen=True)
class Inputs:
    runs: tuple[RunFolder, ...]
    race: Race | None
    ablation: Ablation | None
    tuning: Tuning | None
    files: tuple[Path, ...]  # what to watch besides the runs


def read_inputs(paths: Sequence[Path]) -> Inputs:
    """Runs in the order given, each once; at most one result of each kind."""
    runs: dict[Path, RunFolder] = {}
    results: dict[type, Any] = {}
    files: list[Path] = []
    for path in paths:
        found_files = _result_files(path)
        folders = [] if found_files else _run_folders(path)
        for file in found_files:
            result = read_result(file)
            if type(result) in results:
                raise ConfigError(
                    f"{file} is a second {result.kind}; a page shows one: leave one out"
                )
            results[type(result)] = result
            files.append(file)
            named = [file.parent / place for place in result.runs]
            folders += [folder for folder in named if _has_config(folder)]
        for folder in folders:
            runs.setdefault(folder.resolve(), RunFolder(folder))
    found = results.get(Race), results.get(Ablation), results.get(Tuning)
    return Inputs(tuple(runs.values()), *found, tuple(files))


def _has_config(folder: Path) -> bool:
    try:
        return (folder / "config.toml").is_file()
    except OSError:  # a name in a result that is longer than any file's can be
        return False


def _result_files(path: Path) -> list[Path]:
    if (path / "config.toml").is_file():
        return []
    if path.is_dir():
        return [path / name for name in RESULTS if (path / name).is_file()]
    if path.is_file() and path.suffix == ".json":
        return [path]
    raise ConfigError(
        f"{path} is not there or not of use; name a run folder, a race.json, an ablation.json or "
        "a tune.json"
    )


def _run_folders(path: Path) -> list[Path]:
    """A run folder, or the runs in a folder without a result."""
    if (path / "config.toml").is_file():
        return [path]
    # What is under way has no result yet, but runs.
    inside = sorted(path.glob("*/config.toml")) or sorted(path.glob("runs/*/config.toml"))
    if not inside:
        raise ConfigError(
            f"{path} holds neither a run (config.toml), nor {' or '.join(RESULTS)}, nor "
            "folders of runs; name a run folder"
        )
    return [config.parent for config in inside]
