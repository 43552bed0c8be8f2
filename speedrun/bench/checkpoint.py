"""What a checkpoint costs the training thread, at one every 20 steps of the nano track.

The thread pays for a copy of weights and moments; a writer hashes, flushes and renames meanwhile,
which also takes cores from the steps beside it. Blocks of 20 steps with and without a checkpoint
take turns, so that both see the same machine.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from speedrun.bench.step import nano_config, one_step
from speedrun.train.keeper import NEVER, Keeper
from speedrun.train.setup import Parts, find_dataset, prepare
from speedrun.train.world import World

EVERY = 20


def measure_checkpoint(pairs: int = 3) -> dict[str, float | int | str]:
    """`share_of_step`: the training thread's seconds for a checkpoint over those of 20 steps.

    `slowdown`: a block of steps with a checkpoint over one without, the writer's share included.
    """
    config = nano_config()
    parts = prepare(config, find_dataset(config), World.alone(torch.device("cpu")))
    copies, ratios, steps, said = [], [], [], []
    with parts.loader, tempfile.TemporaryDirectory() as folder:
        keeper = Keeper(Path(folder), NEVER, 1, lambda _, **v: said.append(v), writes=True)
        _block(parts, None)  # the first steps allocate
        for pair in range(pairs):
            order = (None, keeper) if pair % 2 else (keeper, None)
            seconds = {chosen is keeper: _block(parts, chosen) for chosen in order}
            (with_all, copy), (without, _) = seconds[True], seconds[False]
            copies.append(copy)
            ratios.append(with_all / without)
            steps.append(without / EVERY)
        keeper.close()
    bytes_written = sum(tensor.numel() * 4 for tensor in parts.optimizer.export_state().values())
    bytes_written += sum(tensor.numel() * 4 for tensor in parts.model.state_dict().values())
    return {
        "steps_between": EVERY,
        "checkpoint_bytes": bytes_written,
        "step_seconds": median(steps),
        "thread_seconds": median(copies),
        "writer_seconds": median(float(values["write_seconds"]) for values in said),
        "share_of_step": median(copies) / (EVERY * median(steps)),
        "slowdown": median(ratios),
    }


def _block(parts: Parts, keeper: Keeper | None) -> tuple[float, float]:
    """Seconds of 20 steps, after a checkpoint if there is a keeper, and those of its copy."""
    begun = time.perf_counter()
    copied = begun
    if keeper:
        progress = {"val_step": -1, "val_loss": None, "nonfinite": 0}
        state = parts.optimizer.export_state()
        keeper.save({"step": 1, "progress": progress}, parts.model.state_dict(), state)
        copied = time.perf_counter()
    for step in range(EVERY):
        one_step(parts, step)
    seconds = time.perf_counter() - begun
    if keeper:
        keeper.finish()  # the next block must not pay for this one's writer
    return seconds, copied - begun
