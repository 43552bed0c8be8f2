"""Two ranks of one thread against one rank of two threads: what a rank costs on a CPU.

Both worlds are started once and take turns at a few training steps of the nano track, all of it:
forward, backward, the ranks' agreement, the optimizer. Whoever waits sleeps.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from speedrun.bench.step import nano_config
from speedrun.bench.timing import Figures, seconds_of
from speedrun.config.schema import Config
from speedrun.data.find import find_dataset
from speedrun.limits import cores
from speedrun.train.trainer import Trainer
from speedrun.train.world import World

STEPS = 5  # of a world's turn


def measure_ranks(rounds: int = 5, ranks: int = 2, overrides: Sequence[str] = ()) -> Figures:
    """`ratio`: tokens per second of `ranks` ranks over those of one with as many threads."""
    config = nano_config(overrides=overrides)
    find_dataset(config)  # built once, before the ranks ask for it
    with tempfile.TemporaryDirectory() as folder:
        worlds = {size: _start(config, size, ranks // size, Path(folder)) for size in (1, ranks)}
        for world in worlds.values():
            _seconds(world)  # the first steps allocate
        taken: dict[int, list[float]] = {size: [] for size in worlds}
        for turn in range(rounds):
            for size in (1, ranks) if turn % 2 else (ranks, 1):
                taken[size].append(_seconds(worlds[size]))
        for world in worlds.values():
            for process, pipe in world:
                pipe.send(0)
                process.join()
    speeds = {size: STEPS * config.batch.tokens / median(taken[size]) for size in taken}
    return {
        "ranks": ranks,
        "cores": cores(),
        "tokens_per_second_one_rank": speeds[1],
        "tokens_per_second_ranks": speeds[ranks],
        "ratio": median(one / many for one, many in zip(taken[1], taken[ranks], strict=True)),
    }


Group = list[tuple[multiprocessing.context.SpawnProcess, Connection]]


def _start(config: Config, size: int, threads: int, folder: Path) -> Group:
    context = multiprocessing.get_context("spawn")
    started: Group = []
    for rank in range(size):
        here, there = context.Pipe()
        arguments = (config, rank, size, threads, folder / f"meeting-{size}", there)
        process = context.Process(target=_rank, args=arguments)
        process.start()
        started.append((process, here))
    return started


def _seconds(world: Group) -> float:
    for _, pipe in world:
        pipe.send(STEPS)
    return max(float(pipe.recv()) for _, pipe in world)


def _rank(
    config: Config, rank: int, size: int, threads: int, meeting: Path, pipe: Connection
) -> None:
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    world = World(rank, size, size, torch.device("cpu"))
    trainer = Trainer(config, world, find_dataset(config))
    trainer.share_gradients()
    torch.set_num_threads(threads)
    with trainer.loader:
        while steps := pipe.recv():
            world.barrier()
            pipe.send(sum(seconds_of(trainer.step) for _ in range(steps)))
    World.leave()
