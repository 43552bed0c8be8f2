"""What a checkpoint costs the training thread, at one every 20 steps of the nano track.

The thread pays for a copy of weights and moments; a writer hashes, flushes and renames meanwhile,
which also takes cores from the steps beside it. Blocks of 20 steps with and without a checkpoint
take turns, so that both see the same machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from speedrun.bench.step import nano_trainer
from speedrun.bench.timing import Figures, seconds_of
from speedrun.train.checkpoint_writer import CheckpointWriter
from speedrun.train.request import Interval
from speedrun.train.trainer import Trainer

EVERY = 20


def measure_checkpoint(pairs: int = 3, overrides: Sequence[str] = ()) -> Figures:
    """`share_of_step`: the training thread's seconds for a checkpoint over those of 20 steps.

    `slowdown`: a block of steps with a checkpoint over one without, the writer's share included.
    """
    trainer = nano_trainer(overrides=overrides)
    copies, ratios, steps, events = [], [], [], []
    with trainer.loader, tempfile.TemporaryDirectory() as folder:
        writer = CheckpointWriter(
            Path(folder), Interval(), 1, lambda _, **values: events.append(values), writes=True
        )
        _block(trainer, None)  # the first steps allocate
        for pair in range(pairs):
            order = (None, writer) if pair % 2 else (writer, None)
            seconds = {chosen is writer: _block(trainer, chosen) for chosen in order}
            (with_all, copy), (without, _) = seconds[True], seconds[False]
            copies.append(copy)
            ratios.append(with_all / without)
            steps.append(without / EVERY)
        writer.close()
    tensors = {**trainer.model.state_dict(), **trainer.optimizer.export_state()}
    return {
        "steps_between": EVERY,
        "checkpoint_bytes": sum(tensor.numel() * 4 for tensor in tensors.values()),
        "step_seconds": median(steps),
        "thread_seconds": median(copies),
        "writer_seconds": median(float(values["write_seconds"]) for values in events),
        "share_of_step": median(copies) / (EVERY * median(steps)),
        "slowdown": median(ratios),
    }


def _block(trainer: Trainer, writer: CheckpointWriter | None) -> tuple[float, float]:
    """Seconds of 20 steps, after a checkpoint if there is a writer, and those of its copy."""
    copy = seconds_of(lambda: trainer.save(writer)) if writer else 0.0
    steps = sum(seconds_of(trainer.step) for _ in range(EVERY))
    assert len([*trainer.outcomes(everything=True)]) == EVERY  # a checkpoint comes after all
    if writer:
        writer.finish()  # the next block must not pay for this one's writer
    return copy + steps, copy
