"""A tiny track with a text of its own, honest runs on it, and the tools of somebody who cheats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from speedrun.config import files
from speedrun.config.experiment import run_hash
from speedrun.config.resolve import change, from_toml, resolve, to_toml
from speedrun.config.schema import Config
from speedrun.data.build import build_dataset
from speedrun.data.find import find_dataset
from speedrun.errors import RunError
from speedrun.files import write_json
from speedrun.science.leaderboard import RULES, check
from speedrun.train import checkpoint
from speedrun.train.request import Request
from speedrun.train.run import RunFolder
from speedrun.train.session import run_training
from tests.train.heard import ALONE, Heard

ALPHA = 0.01
SEEDS = (0, 1, 2)
TRACK = """
[data]
sources = ["{text}"]
tokenizer = "byte"
test_fraction = 0.1
order = "shuffled"
[model]
layers = 2
width = 32
heads = 2
[batch]
tokens = 256
length = 64
[train]
target = {target}
steps = 16
[validation]
tokens = 512
every = 4
"""
Row = dict[str, Any]


class Board:
    """Tracks `sums` and `hard` in a folder of their own, with three honest runs of `sums`."""

    def __init__(self, root: Path) -> None:
        self.root, self.text, self.folder = root, root / "text", root / "tracks"
        self.text.mkdir()
        self.folder.mkdir()
        for index in range(40):
            lines = [f"{index} + {n} = {index + n}\n" for n in range(120)]
            (self.text / f"{index:02d}.txt").write_text("".join(lines))
        for name, target in (("sums", 5.1), ("hard", 1.0)):
            text = TRACK.format(text=self.text, target=target)
            (self.folder / f"{name}.toml").write_text(text)
        with self.tracks():
            self.honest = [self.train(root / f"honest{seed}", seed=seed) for seed in SEEDS]

    @contextmanager
    def tracks(self) -> Iterator[None]:
        """With these built in, in place of the package's own."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(files.FOLDERS, "track", self.folder)
            yield

    def config(self, *overrides: str, seed: int = 0, track: str = "sums") -> Config:
        words = [f"train.seed={seed}", "machine.threads=1", *overrides]
        return resolve("modern", track, words).config

    def train(
        self,
        folder: Path,
        *overrides: str,
        seed: int = 0,
        track: str = "sums",
        display: Heard | None = None,
        **how: Any,
    ) -> Path:
        config = self.config(*overrides, seed=seed, track=track)
        request, shown = Request(**how), display or Heard()
        run_training(config, RunFolder(folder), find_dataset(config), shown, ALONE, request)
        return folder

    def three(self, folder: Path, *overrides: str, **how: Any) -> list[Path]:
        return [self.train(folder / f"{seed}", *overrides, seed=seed, **how) for seed in SEEDS]

    def copies(self, folder: Path) -> list[Path]:
        """The honest runs once more, to be spoilt."""
        return [Path(shutil.copytree(run, folder / run.name)) for run in self.honest]

    def dataset(self, folder: Path, *texts: str) -> Path:
        """Another dataset of bytes, of documents that somebody would like better."""
        (folder / "texts").mkdir(parents=True)
        for index, text in enumerate(texts):
            (folder / "texts" / f"{index}.txt").write_text(text)
        build_dataset([str(folder / "texts")], folder / "dataset", "byte", test_fraction=0.1)
        return folder / "dataset"

    def validation_text(self) -> str:
        """What a run on the track is judged by; tokens of this tokenizer are bytes."""
        found = find_dataset(self.config())
        shard = next(found.glob("*val*.bin")).read_bytes()[1024:]
        return bytes(shard[i] for i in range(0, len(shard), 2) if not shard[i + 1]).decode()


def refused(runs: list[Path], rule: str, found: str = "") -> None:
    """By this rule, which is quoted whole, with a word on what was found."""
    with pytest.raises(RunError) as caught:
        check(runs, ALPHA)
    text = str(caught.value)
    assert RULES[rule].format(alpha=ALPHA) in text
    assert found in text
    assert "\n" not in text


def edit_summary(path: Path, **changes: Any) -> None:
    file = path / "summary.json"
    write_json(file, {**json.loads(file.read_text()), **changes})


def edit_config(path: Path, *overrides: str, seal: bool = True, **names: str) -> None:
    """`names` are those of recipe and track, which are no settings; sealed: see `say_again`."""
    config = change(from_toml(path / "config.toml"), overrides, {}).config
    (path / "config.toml").write_text(to_toml(config.model_copy(update=names)))
    if seal:
        say_again(path)


def edit_environment(path: Path, *, seal: bool = True, **changes: Any) -> None:
    file = path / "environment.json"
    write_json(file, {**json.loads(file.read_text()), **changes})
    if seal:
        say_again(path)


def say_again(path: Path, *, older: bool = False) -> None:
    """Every start and the last checkpoint say what the files say by now; older: nothing at all."""
    config = from_toml(path / "config.toml")
    code = json.loads((path / "environment.json").read_text())["code_sha256"]
    said = {
        "experiment_sha256": run_hash(config), "train_steps": config.steps, "code_sha256": code
    }  # fmt: skip

    def again(row: Row) -> Row:
        if row["kind"] not in ("start", "resume"):
            return row
        return {key: value for key, value in row.items() if key not in said} | (
            {} if older else said
        )

    edit_metrics(path, again)
    file, meta = _read_meta(path)
    rest = {key: value for key, value in meta.items() if key not in said}
    _write_meta(file, rest | ({} if older else said))


def edit_metrics(path: Path, change: Callable[[Row], Row | None], *, seal: bool = True) -> None:
    """Every row as `change` leaves it, or gone; sealed: with the hash that the summary states."""
    rows = [change(json.loads(line)) for line in (path / "metrics.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(row) + "\n" for row in rows if row is not None)
    (path / "metrics.jsonl").write_text(text)
    if seal:
        edit_summary(path, metrics_sha256=RunFolder(path).metrics_digest())


def edit_checkpoint(path: Path, **progress: Any) -> None:
    """The last checkpoint's record, with its own hash put right."""
    file, meta = _read_meta(path)
    meta["progress"].update(progress)
    _write_meta(file, meta)


def edit_meta(path: Path, **changes: Any) -> None:
    file, meta = _read_meta(path)
    _write_meta(file, meta | changes)


def _read_meta(path: Path) -> tuple[Path, Row]:
    file = checkpoint.folders(path / "checkpoints")[-1] / checkpoint.META
    return file, json.loads(file.read_text())


def _write_meta(file: Path, meta: Row) -> None:
    file.write_text(json.dumps(meta | {"meta_sha256": checkpoint._sha256_of_meta(meta)}))


def change_seed(path: Path, seed: int) -> None:
    edit_summary(path, seed=seed)
    edit_config(path, f"train.seed={seed}")
