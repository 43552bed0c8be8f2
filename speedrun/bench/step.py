"""Training steps of four models: share of the matmul peak, and where the time goes.

`best`, `record-18` and `modern` at nano size, and a small byte model. Steps and the matmuls that
measure the peak take turns, so that a slow minute slows all. FLOPs are those of the model alone,
forward and backward, counted over the keys that the steps' own queries see: Muon's products do not
count. What the kinds of work take is read off a profile of further steps. What is built before the
first step is timed in processes of its own, with an empty cache folder and with the one the first
of them filled.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from speedrun.bench.timing import Figures, seconds_of
from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.data.find import find_dataset
from speedrun.hardware import matmul_flops
from speedrun.model import native
from speedrun.model.plan import AttentionPlan
from speedrun.train.estimate import flops_per_token
from speedrun.train.trainer import Trainer
from speedrun.train.world import World

SMALL = (
    "model.layers=4", "model.width=128", "model.heads=2", "batch.length=256", "batch.tokens=2048",
    "attention.window_start=64", "attention.window_end=256", "data.tokenizer=byte",
)  # fmt: skip
SMALL_STEPS = 6  # for one of the larger models'
Models = Mapping[str, tuple[str, tuple[str, ...]]]  # by name: a recipe, and overrides
MODELS: Models = {
    "best": ("best", ()),
    "record_18": ("record-18", ()),
    "modern": ("modern", ()),
    "small": ("best", SMALL),
}
# Kinds of work by parts of the names of their operations; the first that fits.
KINDS = {
    "products": ("linear", "add_mlp", "norm_qkv", "aten::mm", "aten::addmm", "aten::bmm"),
    "loss": ("head_loss", "cross_entropy", "nll_loss", "log_softmax"),
    "attention": ("attention",),
    "elementwise": (
        "norm_rotate", "rms_norm", "blend", "relu", "offset_keys", "aten::add", "aten::mul",
        "aten::cat", "aten::where", "aten::copy_", "aten::sum", "aten::div", "aten::sub",
    ),
    "tables": ("embedding", "index", "aten::fill_", "aten::zero_"),
}  # fmt: skip

BUILD = """
from speedrun.bench.timing import seconds_of
from speedrun.model import native
from speedrun.model.plan import AttentionPlan
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


class Timed:
    """A trainer whose steps are timed, with the FLOPs of each."""

    def __init__(self, recipe: str, overrides: Sequence[str]) -> None:
        self.trainer = nano_trainer(recipe, overrides)
        self.seconds: list[float] = []
        self.flops: list[float] = []

    def step(self) -> None:
        trainer, plans = self.trainer, []
        make = trainer.planner.plan

        def watched(documents: Tensor) -> AttentionPlan:
            plans.append(make(documents))
            return plans[-1]

        with mock.patch.object(trainer.planner, "plan", watched):
            self.seconds.append(seconds_of(trainer.step))
        seen = sum(visible(plan) for plan in plans) / len(plans)
        per_token = flops_per_token(trainer.config, trainer.model, seen)
        self.flops.append(per_token * trainer.config.batch.tokens)


def visible(plan: AttentionPlan) -> float:
    """Keys that a query of a batch sees, on average."""
    first_BT = plan.for_layer(0).mask
    assert isinstance(first_BT, Tensor), "the native kernels' plan"
    return (torch.arange(first_BT.size(1)) - first_BT + 1).double().mean().item()


def kind_of(event: FunctionEvent) -> str:
    """The kind of work of a profiled operation, by its own name or by what called it."""
    caller: FunctionEvent | None = event
    while caller is not None:
        if caller.name.startswith("Optimizer.step"):
            return "optimizer"
        caller = caller.cpu_parent
    for kind, parts in KINDS.items():
        if any(part in event.name for part in parts):
            return kind
    return "other"


def shares_by_kind(trainer: Trainer, steps: int) -> dict[str, float]:
    """Shares of the time of some steps; what no operation accounts for, Python, is in `other`."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        seconds = sum(seconds_of(trainer.step) for _ in range(steps))
    shares = dict.fromkeys((*KINDS, "optimizer"), 0.0)
    for event in seen.events() or ():
        kind = kind_of(event)
        if kind in shares:
            shares[kind] += event.self_cpu_time_total / 1e6 / seconds
    return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}


def measure_step(repeats: int = 12, models: Models = MODELS) -> Figures:
    timed = {name: Timed(recipe, overrides) for name, (recipe, overrides) in models.items()}
    peaks: dict[str, list[float]] = {name: [] for name in timed}
    figures: Figures = {}
    with ExitStack() as stack:
        for one in timed.values():
            stack.enter_context(one.trainer.loader)
        for _ in range(repeats + 2):
            for name, one in timed.items():
                for _ in range(SMALL_STEPS if name == "small" else 1):
                    one.step()
                    peaks[name].append(matmul_flops(repeats=3))
        for name, one in timed.items():
            typical = median(one.seconds[2:])
            tokens = one.trainer.config.batch.tokens
            figures[f"peak_share_{name}"] = median(one.flops[2:]) / typical / median(peaks[name])
            figures[f"step_seconds_{name}"] = typical
            figures[f"tokens_per_second_{name}"] = tokens / typical
            figures[f"peak_flops_{name}"] = median(peaks[name])
        for name, one in timed.items():
            for kind, share in shares_by_kind(one.trainer, max(1, repeats // 4)).items():
                figures[f"share_{name}_{kind}"] = share
    with tempfile.TemporaryDirectory() as home:
        cold, warm = build_seconds(home), build_seconds(home)
    kernel = native.load()
    built = f"no native kernels: {kernel}" if isinstance(kernel, str) else kernel.built
    return {
        **figures,
        "threads": torch.get_num_threads(),
        "compile_seconds_cold": cold,
        "compile_seconds_warm": warm,
        "compiled": f"{built}; the default configuration on CPU uses no torch.compile",
    }
