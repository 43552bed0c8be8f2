"""One nano training step: seconds, tokens per second, and share of the matmul peak."""

from __future__ import annotations

import time
from statistics import median

import torch

from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.train.loop import forward_backward
from speedrun.train.setup import Parts, find_dataset, prepare
from speedrun.train.world import World


def nano_config() -> Config:
    return resolve("modern", "nano").config


def one_step(parts: Parts, step: int) -> None:
    forward_backward(parts, next(parts.loader), parts.config.microbatches())
    parts.set_schedule(step)
    parts.optimizer.step()
    parts.optimizer.zero_grad(set_to_none=True)


def nano_step_seconds(repeats: int = 12) -> float:
    """Median seconds of a nano training step."""
    config = nano_config()
    parts = prepare(config, find_dataset(config), World.alone(torch.device("cpu")))
    seconds = []
    with parts.loader:
        for step in range(repeats + 2):
            begun = time.perf_counter()
            one_step(parts, step)
            seconds.append(time.perf_counter() - begun)
    return median(seconds[2:])
