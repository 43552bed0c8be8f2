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
import time
from statistics import median

import torch

from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.hardware import matmul_flops
from speedrun.model import native
from speedrun.train.estimate import flops_per_token
from speedrun.train.loop import forward_backward
from speedrun.train.setup import Parts, find_dataset, prepare
from speedrun.train.world import World

BUILD = """
import time
from speedrun.model import native
begun = time.perf_counter()
native.load()
print(time.perf_counter() - begun)
"""


def nano_config(recipe: str = "modern") -> Config:
    return resolve(recipe, "nano").config


def one_step(parts: Parts, step: int) -> None:
    forward_backward(parts, next(parts.loader))
    parts.set_schedule(step)
    parts.optimizer.step()
    parts.optimizer.zero_grad(set_to_none=True)


def nano_parts(recipe: str = "modern") -> Parts:
    config = nano_config(recipe)
    return prepare(config, find_dataset(config), World.alone(torch.device("cpu")))


def step_seconds(parts: Parts, step: int) -> float:
    begun = time.perf_counter()
    one_step(parts, step)
    return time.perf_counter() - begun


def nano_step_seconds(repeats: int = 12) -> float:
    """Median seconds of a nano training step, after two to warm up."""
    parts = nano_parts()
    with parts.loader:
        seconds = [step_seconds(parts, step) for step in range(repeats + 2)]
    return median(seconds[2:])


def optimizer_share(recipe: str = "record-18", repeats: int = 12) -> float:
    """Median share of a nano training step that the whole optimizer takes."""
    parts = nano_parts(recipe)
    shares = []
    with parts.loader:
        for step in range(repeats + 2):
            begun = time.perf_counter()
            forward_backward(parts, next(parts.loader))
            parts.set_schedule(step)
            reached = time.perf_counter()
            parts.optimizer.step()
            ended = time.perf_counter()
            parts.optimizer.zero_grad(set_to_none=True)
            shares.append((ended - reached) / (ended - begun))
    return median(shares[2:])


def build_seconds(home: str) -> float:
    """Seconds a fresh process spends on building and loading the kernels, its cache in `home`."""
    environment = {**os.environ, "SPEEDRUN_HOME": home}
    child = subprocess.run(
        [sys.executable, "-c", BUILD], env=environment, capture_output=True, text=True, check=True
    )
    return float(child.stdout)


def measure_step(repeats: int = 12) -> dict[str, float | int | str]:
    parts = nano_parts()
    seconds, peaks = [], []
    with parts.loader:
        for step in range(repeats + 2):
            seconds.append(step_seconds(parts, step))
            peaks.append(matmul_flops(repeats=3))
    typical, peak = median(seconds[2:]), median(peaks[2:])
    tokens = parts.config.batch.tokens
    flops = flops_per_token(parts.config, parts.model) * tokens
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
