"""`train --log wandb` with the real package, offline; `make integration` installs it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch

from speedrun.config.schema import Config
from speedrun.train.log import Display
from speedrun.train.request import Request
from speedrun.train.run import RunFolder
from speedrun.train.session import run_training
from speedrun.train.world import World


def test_wandb_gets_the_same_curves(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="NOT TESTED: wandb, which `make integration` installs")
    wandb = import_module("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config, run = tiny(), RunFolder(tmp_path / "run")
    alone = World.alone(torch.device("cpu"))
    run_training(config, run, Path(config.data.dir), Display(), alone, Request(log=("wandb",)))
    try:
        assert wandb.run.name == "run"
        known = dict(wandb.run.summary)  # wandb takes in a step when the next one begins
        for kind in ("train", "val"):
            row = [row for row in run.read_metrics(kind) if row["step"] < config.steps][-1]
            for key in ("loss", "seconds", "tokens"):
                assert known[f"{kind}/{key}"] == pytest.approx(row[key])
    finally:
        wandb.finish()
    assert len(list((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))) == 1
