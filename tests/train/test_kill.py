"""Killed, asked to stop or out of time: a run goes on exactly where it was."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speedrun.config.schema import Config
from speedrun.train import checkpoint
from speedrun.train.run import RunFolder
from tests.conftest import TINY
from tests.train import jobs
from tests.train.children import on_ranks, speedrun, steps_logged
from tests.train.heard import losses, newest, same_bits, tensors, values
from tests.waiting import PATIENCE, wait_for

KILLS, STRIDE = 20, 34  # a kill every so many steps, of 700


Words = list[str | Path]


def words(dataset: Path, folder: Path, *more: str) -> Words:
    return [
        "train", "modern", "--run", folder, "--sample-tokens", "0", *TINY, f"data.dir={dataset}",
        *more,
    ]  # fmt: skip


def finish(child: Any, code: int, output: Path) -> None:
    child.join(PATIENCE)
    assert child.exitcode == code, output.read_text()[-3000:]


def end(folder: Path) -> dict[str, Any]:
    # Times differ between runs; all else in the state must not.
    times = (
        "seconds",
        "earlier_wall",
        "flops_done",
        "flops_possible",
        "peak_seconds",
        "val_seconds",
    )
    progress = newest(folder / "checkpoints").meta["progress"]
    progress["looks"] = [(step, loss) for step, loss, *_ in progress["looks"]]
    if progress["to_target"]:
        progress["to_target"] = {key: progress["to_target"][key] for key in ("steps", "cell")}
    return {key: value for key, value in progress.items() if key not in times}


def assert_same_run(left: Path, right: Path) -> None:
    """Every loss, every weight and moment, and the position in the data, bit for bit."""
    for kind in ("train", "val"):
        assert values(left, kind) == values(right, kind)
        assert losses(left, kind) == losses(right, kind)
    assert end(left) == end(right)
    assert same_bits(tensors(left), tensors(right))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_at_random_moments_leave_no_trace(tiny_dataset: Path, tmp_path: Path) -> None:
    """Checkpoints every 2 steps and validations every 4: kills meet them all.

    No child can come to its end before its kill, which waits for a step drawn at random, for a
    checkpoint half-written, or for no more than a moment.
    """
    steps = "train.steps=700"
    output, run = tmp_path / "output", tmp_path / "cut"
    finish(speedrun(words(tiny_dataset, tmp_path / "whole", steps), output), 0, output)
    often = ("--checkpoint-every", "2")
    start = words(tiny_dataset, run, steps, *often)
    resume: Words = ["train", "--resume", "--run", run, "--sample-tokens", "0", *often]
    moments = random.Random(5)
    torn, reached = 0, []
    for kill in range(KILLS):
        last = STRIDE * (kill + 1)
        child = speedrun(resume if kill else start, output, hold=last)
        if kill % 5 == 4:  # while starting
            time.sleep(moments.uniform(0.0, 1.0))
        elif kill % 5 == 3:
            half = run / f"checkpoints/.step-{last:06d}.partial/model.safetensors"
            wait_for(half.exists, "half a checkpoint")
        else:
            moment = moments.randrange(last - STRIDE + 4, last)
            wait_for(lambda m=moment: steps_logged(run) >= m, f"step {moment}")  # type: ignore[misc]
            time.sleep(moments.uniform(0.0, 0.02))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL, output.read_text()[-3000:]
        torn += any((run / "checkpoints").glob(".*.partial"))
        reached.append(steps_logged(run))
    finish(speedrun(resume, output), 0, output)
    assert torn > 0, "no kill met a checkpoint half-written"
    assert len(set(reached)) > KILLS / 2, reached
    assert_same_run(tmp_path / "whole", run)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_killed_under_torchrun_is_started_again(
    tiny: Callable[..., Config], tiny_dataset: Path, tmp_path: Path
) -> None:
    """Two ranks; first one of them is killed, after the restart the other."""
    run, whole = tmp_path / "cut", tmp_path / "whole"
    length = ("train.steps=200", "validation.every=50")
    on_ranks(2, jobs.train, tmp_path, tiny(*length), whole)
    ranks = ("--ranks", "2", "--max-restarts", "3", "--checkpoint-every", "5")
    job = subprocess.Popen(
        [sys.executable, "-m", "speedrun", *words(tiny_dataset, run, *length, *ranks)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    for rank, moment in ((1, 20), (0, 60)):
        wait_for(lambda m=moment: steps_logged(run) > m, f"step {moment}")  # type: ignore[misc]
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(children[rank]), signal.SIGKILL)
        resumes = 1 if moment == 20 else 2
        wait_for(lambda n=resumes: len(values(run, "resume")) >= n, "a restart")  # type: ignore[misc]
    output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, output
    assert_same_run(whole, run)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_saves_once_and_has_its_own_exit_code(
    tiny_dataset: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    child = speedrun(words(tiny_dataset, run, "train.steps=100000"), output)
    wait_for(lambda: steps_logged(run) > 2, "a step")
    assert child.pid is not None
    os.kill(child.pid, number)
    finish(child, code, output)
    said = output.read_text()
    assert f"speedrun train --resume --run {run}" in said
    assert "Traceback" not in said
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["stopped_early"], summary["exit_code"]) == (True, code)
    saved = RunFolder(run).read_metrics("checkpoint")
    assert [row["step"] for row in saved] == [summary["steps"]]
    assert [path.name for path in checkpoint.folders(run / "checkpoints")] == [saved[0]["folder"]]


def test_sigusr1_saves_and_goes_on_and_the_time_limit_stops(
    tiny_dataset: Path, tmp_path: Path
) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    child = speedrun(words(tiny_dataset, run, "train.steps=100000"), output)
    wait_for(lambda: steps_logged(run) > 2, "a step")
    assert child.pid is not None
    os.kill(child.pid, signal.SIGUSR1)
    folder = RunFolder(run)
    wait_for(lambda: len(folder.read_metrics("checkpoint")) == 1, "a checkpoint")
    (saved,) = folder.read_metrics("checkpoint")
    wait_for(lambda: steps_logged(run) > saved["step"] + 2, "another step")
    child.kill()
    child.join()
    limited: Words = ["train", "--resume", "--run", run, "--time-limit", "2s"]
    finish(speedrun([*limited, "--sample-tokens", "0"], output), 124, output)
    summary = json.loads(folder.summary.read_text())
    assert summary["exit_code"] == 124
    assert summary["wall_seconds"] > 2  # a limit, so true at any speed
    last = folder.read_metrics("checkpoint")[-1]
    assert last["step"] == summary["steps"] > saved["step"]


def test_resuming_a_complete_run_says_so_and_does_nothing(
    tiny_dataset: Path, tmp_path: Path
) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    finish(speedrun(words(tiny_dataset, run), output), 0, output)

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    before = files()
    finish(speedrun(["train", "--resume", "--run", run], tmp_path / "again"), 0, output)
    assert "complete after 8 steps" in (tmp_path / "again").read_text()
    assert files() == before


def test_a_folder_in_use_by_a_live_process_is_refused(tiny_dataset: Path, tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    child = speedrun(
        words(tiny_dataset, run, "train.steps=100000", "--checkpoint-every", "1"), output
    )
    wait_for(lambda: len(RunFolder(run).read_metrics("checkpoint")) > 0, "a checkpoint")
    finish(speedrun(["train", "--resume", "--run", run], tmp_path / "second"), 1, output)
    assert "is in use by another process" in (tmp_path / "second").read_text()
    assert child.is_alive()
    child.kill()
    child.join()
    # A lock dies with its process.
    last: Words = ["train", "--resume", "--run", run, "--time-limit", "1s", "--sample-tokens", "0"]
    finish(speedrun(last, tmp_path / "third"), 124, tmp_path / "third")
