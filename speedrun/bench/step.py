"""One nano training step: seconds, tokens per second, share of the matmul peak, seconds of builds.

Steps and the matmuls that measure the peak take turns, so that a slow minute slows both. What is
built before the first step is timed in processes of its own, with an empty cache folder and with
the one the first of them filled.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from statistics import median
from unittest import mock

import torch

from speedrun.bench.timing import Figures, seconds_of
from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.data.find import find_dataset
from speedrun.hardware import matmul_flops
from speedrun.model import native
from speedrun.train.estimate import flops_per_token
from speedrun.train.trainer import Trainer
from speedrun.train.world import World

BUILD = """
from speedrun.bench.timing import seconds_of
from speedrun.model import native
print(seconds_of(native.load))
"""


def nano_config(recipe: str = "modern", overrides: Sequence[str] = ()) -> Config:
    return resolve(recipe, "nano", overrides).config


def nano_trainer(recipe: str = "modern", overrides: Sequence[str] = ()) -> Trainer:
    config = nano_config(recipe, overrides)
    return Trainer(config, World.alone(torch.device("cpu")), find_dataset(config))


def nano_step_seconds(repeats: int = 12) -> float:
    """Median seconds of a nano training step, after two to warm up."""
    trainer = nano_trainer()
    with trainer.loader:
        seconds = [seconds_of(trainer.step) for _ in range(repeats + 2)]
    return median(seconds[2:])


def optimizer_share(
    recipe: str = "record-18", repeats: int = 12, overrides: Sequence[str] = ()
) -> float:
    """Median share of a nano training step that the whole optimizer takes."""
    trainer, inside = nano_trainer(recipe, overrides), 0.0
    update = trainer.optimizer.step

    def timed() -> None:
        nonlocal inside
        inside = seconds_of(update)

    shares = []
    with trainer.loader, mock.patch.object(trainer.optimizer, "step", timed):
        for _ in range(repeats + 2):
            seconds = seconds_of(trainer.step)
            shares.append(inside / seconds)
    return median(shares[2:])


def build_seconds(home: str) -> float:
    """Seconds a fresh process spends on building and loading the kernels, its cache in `home`."""
    environment = {**os.environ, "SPEEDRUN_HOME": home}
    child = subprocess.run(
        [sys.executable, "-c", BUILD], env=environment, capture_output=True, text=True, check=True
    )
    return float(child.stdout)


def measure_step(repeats: int = 12, overrides: Sequence[str] = ()) -> Figures:
    trainer = nano_trainer(overrides=overrides)
    seconds, peaks = [], []
    with trainer.loader:
        for _ in range(repeats + 2):
            seconds.append(seconds_of(trainer.step))
            peaks.append(matmul_flops(repeats=3))
    typical, peak = median(seconds[2:]), median(peaks[2:])
    tokens = trainer.config.batch.tokens
    flops = flops_per_token(trainer.config, trainer.model) * tokens
    with tempfile.TemporaryDirectory() as home:
        cold, warm = build_seconds(home), build_seconds(home)
    kernel = native.load()
    built = f"no native kernels: {kernel}" if isinstance(kernel, str) else "the native kernels"
    return {
        "tokens_per_second": tokens / typical,
        "peak_share": flops / typical / peak,
        "step_seconds": typical,
        "peak_flops": peak,
        "threads": torch.get_num_threads(),
        "compile_seconds_cold": cold,
        "compile_seconds_warm": warm,
        "compiled": f"{built}; the default configuration on CPU uses no torch.compile",
    }
