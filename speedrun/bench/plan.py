"""Plans for this CPU beside the steps they are of: `speedrun plan --on cpu` against the trainer.

A plan and some real steps take turns, at the middle of the run, whose window the plan's pieces
have. Real text has documents of other lengths than the plan's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import torch

from speedrun.bench.timing import Figures, seconds_of
from speedrun.config.resolve import resolve
from speedrun.data.dataset import Dataset
from speedrun.data.find import find_dataset
from speedrun.plan.here import plan_here
from speedrun.train.trainer import Trainer
from speedrun.train.world import World

Models = Mapping[str, tuple[str, str, tuple[str, ...]]]  # by name: recipe, track, overrides
MODELS: Models = {
    "best": ("best", "nano", ()),
    "record_18": ("record-18", "nano", ()),
    "modern": ("modern", "nano", ()),
    "baseline": ("baseline", "nano", ()),
    "adamw": ("adamw", "optimizer", ()),
    "muon": ("muon", "optimizer", ()),
}
STEPS = 4  # between two plans; the first of them finds other things in the cache


def planned_and_real(
    recipe: str, track: str, overrides: Sequence[str], repeats: int
) -> tuple[float, float]:
    """Seconds of a step at the middle of the run, in the median."""
    config = resolve(recipe, track, overrides).config
    folder = find_dataset(config)
    vocab_size = Dataset.open(folder).vocab_size
    trainer = Trainer(config, World.alone(torch.device("cpu")), folder)
    trainer.progress.step = config.steps // 2
    planned, real = [], []
    with trainer.loader:
        for _ in range(repeats):
            planned.append(plan_here(config, vocab_size).middle_step)
            real += [seconds_of(trainer.step) for _ in range(STEPS)][1:]
    return median(planned), median(real)


def measure_plan(repeats: int = 5, models: Models = MODELS) -> Figures:
    figures: Figures = {}
    for name, words in models.items():
        planned, real = planned_and_real(*words, repeats)
        figures[f"planned_over_real_{name}"] = planned / real
        figures[f"step_ms_{name}"] = 1000 * real
    return figures
