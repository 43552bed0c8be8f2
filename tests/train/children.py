"""Processes for tests, forked from a server that has torch loaded: one starts in a moment, not in
four seconds. A child is a real process, to be killed, signalled and waited for like any other."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from speedrun.files import flush
from speedrun.processes import OF_A_COMMAND
from speedrun.train import checkpoint
from speedrun.train.run import RunFolder
from speedrun.train.world import World
from tests.waiting import PATIENCE

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["speedrun.train.session", "tests.train.children"])


def speedrun(
    words: Sequence[str | Path], output: Path, hold: int | None = None, of_a_command: bool = False
) -> BaseProcess:
    """`speedrun WORDS` in a child, its stdout and stderr appended to `output`.

    The checkpoint of step `hold` stays half-written, so training comes to the next one at most.
    """
    child = SERVER.Process(
        target=_main,
        args=([str(word) for word in words], output, hold, of_a_command),
        daemon=True,
    )
    child.start()
    return child


class QuickChild:
    """A `speedrun.science.children.Child`, a start sooner."""

    def __init__(self, words: Sequence[str]) -> None:
        self._output = tempfile.NamedTemporaryFile("r")  # noqa: SIM115
        self._process = speedrun([*words], Path(self._output.name), of_a_command=True)

    def poll(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def last_words(self) -> str:
        return self._output.read().strip().splitlines()[-1]


def _main(words: list[str], output: Path, hold: int | None, of_a_command: bool) -> None:
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ["OMP_NUM_THREADS"] = "1"
    if of_a_command:
        os.environ[OF_A_COMMAND] = "1"
    torch.set_num_threads(1)
    sys.argv = ["speedrun", *words]
    if hold is not None:
        _hold(hold)
    from speedrun.cli import main

    main()


def _hold(step: int) -> None:
    """From now on, the checkpoint of `step` stops after its first file."""

    def held(path: Path) -> None:
        flush(path)
        if path.parent.name == f".step-{step:06d}.partial":
            time.sleep(PATIENCE)

    mock.patch.object(checkpoint, "flush", held).start()


def on_ranks(size: int, job: Callable[..., None], folder: Path, *arguments: Any) -> None:
    """`job(world, *arguments)` on `size` gloo ranks; `folder` holds their meeting point."""
    folder.mkdir(parents=True, exist_ok=True)
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    ranks = [
        SERVER.Process(target=_rank, args=(rank, size, meeting, job, arguments), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + PATIENCE
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    assert codes == [0] * size, f"exit codes of the ranks: {codes}"


def _rank(
    rank: int, size: int, meeting: Path, job: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    try:
        job(World(rank, size, size, torch.device("cpu")), *arguments)
    finally:
        World.leave()


def steps_logged(folder: Path) -> int:
    return len(RunFolder(folder).read_metrics("train"))
