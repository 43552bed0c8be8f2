"""Runs for tests of export: folders as training leaves them, with weights that all matter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.data.dataset import Dataset
from speedrun.data.tokenizer import load_tokenizer
from speedrun.model.gpt import GPT
from speedrun.model.parts import Parts
from speedrun.train import checkpoint
from speedrun.train.run import RunFolder
from tests.conftest import TINY

Make = Callable[..., RunFolder]

# Four layers, since recipes number them; rows that are longer than any window.
SMALL = (
    "model.layers=4", "batch.length=512", "batch.tokens=1024", "validation.tokens=2048",
)  # fmt: skip
WINDOW = ("attention.window_start=64", "attention.window_end=192")


def small(recipe: str, dataset: Path, *overrides: str) -> Config:
    """A recipe in the size of a test; a window it has is one of 192 tokens or one block."""
    words = [*TINY, *SMALL, f"data.dir={dataset}", *overrides]
    config = resolve(recipe, "nano", words).config
    if config.attention.window == "none":
        return config
    return resolve(recipe, "nano", [*words, *WINDOW]).config


def make_run(config: Config, folder: Path, *, step: int | None = None) -> RunFolder:
    """A run whose every weight is drawn: what starts at zero would hide mistakes."""
    dataset = Dataset.open(Path(config.data.dir))
    tokenizer = load_tokenizer(Path(config.data.dir) / "tokenizer")
    torch.manual_seed(0)
    model = GPT(config.model, tokenizer.vocab_size, config.batch.length, Parts.of(config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    run = RunFolder(folder)
    command = f"speedrun train {config.recipe} --run {folder} data.dir={config.data.dir}"
    run.create(config, {"command": command, "speedrun": "0", "libraries": {"torch": "2"}})
    run.keep_code(config)
    tokenizer.save(run.tokenizer)
    meta = {
        "step": config.steps if step is None else step,
        "dataset_fingerprint": dataset.fingerprint,
    }
    checkpoint.save(run.checkpoints, meta, model.state_dict(), {})
    return run


def maker(folder: Path, dataset: Path) -> Make:
    """Makes the run of a recipe in `folder`."""

    def made(recipe: str = "best", *overrides: str, step: int | None = None) -> RunFolder:
        return make_run(small(recipe, dataset, *overrides), folder, step=step)

    return made


def read(path: Path) -> Any:
    return json.loads(path.read_bytes())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
