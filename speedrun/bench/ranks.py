"""Two ranks of one thread against one rank of two threads: what a rank costs on a CPU.

And two ranks that share their gradients out against two that average all of them, in time and in
bytes, as the kernel counts them. All worlds are started once and take turns at a few training steps
of the nano track, all of it: forward, backward, the ranks' agreement, the optimizer. Whoever waits
sleeps.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
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
    """`ratio`: tokens per second of `ranks` ranks over those of one with as many threads.

    `averaged_over_shared`: what an all-reduce of all gradients takes, of what it takes to send them
    to whoever needs them.
    """
    figures = _one_and_many(nano_config(overrides=overrides), rounds, ranks)
    return figures | _shared_and_averaged(nano_config("record-18", overrides), rounds, ranks)


def _one_and_many(config: Config, rounds: int, ranks: int) -> Figures:
    one, many = _take_turns([(config, 1, ranks), (config, ranks, 1)], rounds)
    tokens = STEPS * config.batch.tokens
    return {
        "ranks": ranks,
        "cores": cores(),
        "tokens_per_second_one_rank": tokens / median(turn.seconds for turn in one),
        "tokens_per_second_ranks": tokens / median(turn.seconds for turn in many),
        "ratio": median(a.seconds / b.seconds for a, b in zip(one, many, strict=True)),
    }


def _shared_and_averaged(config: Config, rounds: int, ranks: int) -> Figures:
    averages = config.machine.model_copy(update={"share_gradients": False})
    both = [(config, ranks, 1), (config.model_copy(update={"machine": averages}), ranks, 1)]
    shared, averaged = _take_turns(both, rounds)
    pairs = [*zip(averaged, shared, strict=True)]
    figures: Figures = {
        "averaged_over_shared_seconds": median(a.seconds / b.seconds for a, b in pairs)
    }
    if all(turn.sent for turn in (*shared, *averaged)):
        figures["averaged_over_shared_bytes"] = median(a.sent / b.sent for a, b in pairs)
        figures["bytes_of_a_step"] = median(turn.sent for turn in shared) / STEPS
    return figures


class Turn(NamedTuple):
    seconds: float
    sent: int  # bytes, by all ranks; 0 where no kernel counts them


def _take_turns(worlds: Sequence[tuple[Config, int, int]], rounds: int) -> list[list[Turn]]:
    """Of each world (config, ranks, threads of a rank), in an order that alternates."""
    find_dataset(worlds[0][0])  # built once, before the ranks ask for it
    with tempfile.TemporaryDirectory() as folder:
        started = [
            _start(config, size, threads, Path(folder) / f"meeting-{number}")
            for number, (config, size, threads) in enumerate(worlds)
        ]
        for world in started:
            _turn(world)  # the first steps allocate
        taken: list[list[Turn]] = [[] for _ in started]
        for number in range(rounds):
            order = [*enumerate(started)]
            for place, world in order if number % 2 else reversed(order):
                taken[place].append(_turn(world))
        for world in started:
            for process, pipe in world:
                pipe.send(0)
                process.join()
    return taken


Group = list[tuple[multiprocessing.context.SpawnProcess, Connection]]


def _start(config: Config, size: int, threads: int, meeting: Path) -> Group:
    context = multiprocessing.get_context("spawn")
    started: Group = []
    for rank in range(size):
        here, there = context.Pipe()
        arguments = (config, rank, size, threads, meeting, there)
        process = context.Process(target=_rank, args=arguments)
        process.start()
        started.append((process, here))
    return started


def _turn(world: Group) -> Turn:
    before = _sent()
    for _, pipe in world:
        pipe.send(STEPS)
    seconds = max(float(pipe.recv()) for _, pipe in world)
    return Turn(seconds, _sent() - before)


def _sent() -> int:
    """Bytes that this host has sent to itself, as ranks on it do; 0 where no kernel counts them."""
    counters = psutil.net_io_counters(pernic=True).get("lo")
    return counters.bytes_sent if counters else 0


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
