"""Several ranks: one loss curve, one mind about what is finite, one end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from speedrun.config.optimizer import MATRIX_ROLES
from speedrun.data.dataset import Dataset
from speedrun.optim.adam import SHARED_NUMEL
from speedrun.train.estimate import without_storage
from speedrun.train.run import RunFolder
from tests.conftest import TINY
from tests.train import jobs
from tests.train.children import on_ranks, steps_logged
from tests.train.heard import Make, losses, newest, same_bits, tensors, values
from tests.waiting import PATIENCE, wait_for

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
pytestmark = pytest.mark.timeout(900)  # several waits of PATIENCE each


def test_ranks_tell_each_other_numbers_and_texts(tmp_path: Path) -> None:
    on_ranks(3, jobs.talk, tmp_path, tmp_path)


# By recipe, how near losses on several ranks come to those on one. Muon is shared over the ranks,
# and magnifies rounding where singular values are small.
CLOSE = {"modern": 1e-4, "record-18": 2e-3, "best": 2e-3}
TABLES = "model.width=64"  # whose tables are large enough to be shared out by rows
FOUR = "model.layers=4"  # the fewest that these recipes have
LONGER = (FOUR, "train.steps=12")


@pytest.mark.parametrize("recipe", CLOSE)
def test_one_two_and_four_ranks_have_the_same_loss_curve(
    recipe: str, tiny: Make, tmp_path: Path
) -> None:
    config = tiny(FOUR, "train.steps=30", "validation.every=10", recipe=recipe)
    for size in (1, 2, 4):
        on_ranks(size, jobs.train, tmp_path, config, tmp_path / str(size))
        assert json.loads((tmp_path / f"{size}/summary.json").read_text())["world_size"] == size
    for size in (2, 4):
        for kind in ("train", "val"):
            expected = losses(tmp_path / "1", kind)
            assert losses(tmp_path / str(size), kind) == pytest.approx(expected, abs=CLOSE[recipe])
    assert losses(tmp_path / "1")[-1] < losses(tmp_path / "1")[0] - 1


def test_eight_ranks_are_as_one_and_another_number_goes_on(tiny: Make, tmp_path: Path) -> None:
    config = tiny(*LONGER, TABLES, "batch.tokens=512", recipe="record-18")
    for size in (1, 8):
        on_ranks(size, jobs.train, tmp_path, config, tmp_path / str(size))
    expected = losses(tmp_path / "1")
    assert losses(tmp_path / "8") == pytest.approx(expected, abs=CLOSE["record-18"])
    on_ranks(8, jobs.train, tmp_path, config, tmp_path / "cut", {"stop_after": 8})
    on_ranks(2, jobs.train, tmp_path, config, tmp_path / "cut", {"resume": True})
    assert losses(tmp_path / "cut") == pytest.approx(expected, abs=CLOSE["record-18"])


@pytest.mark.parametrize("recipe", CLOSE)
def test_a_checkpoint_of_two_ranks_is_resumed_by_one_and_by_four(
    recipe: str, tiny: Make, tmp_path: Path
) -> None:
    config = tiny(*LONGER, recipe=recipe)
    on_ranks(1, jobs.train, tmp_path, config, tmp_path / "whole")
    for size in (1, 4):
        folder = tmp_path / f"then-{size}"
        on_ranks(2, jobs.train, tmp_path, config, folder, {"stop_after": 8})
        on_ranks(size, jobs.train, tmp_path, config, folder, {"resume": True})
        assert losses(folder) == pytest.approx(losses(tmp_path / "whole"), abs=CLOSE[recipe])


@pytest.mark.parametrize("recipe", CLOSE)
def test_two_ranks_resume_bit_for_bit(recipe: str, tiny: Make, tmp_path: Path) -> None:
    config = tiny(*LONGER, recipe=recipe)
    on_ranks(2, jobs.train, tmp_path, config, tmp_path / "whole")
    on_ranks(2, jobs.train, tmp_path, config, tmp_path / "cut", {"stop_after": 8})
    on_ranks(2, jobs.train, tmp_path, config, tmp_path / "cut", {"resume": True})
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert newest(tmp_path / "cut/checkpoints").step == 12
    assert same_bits(tensors(tmp_path / "cut"), tensors(tmp_path / "whole"))


@pytest.mark.parametrize("recipe", ["modern", "record-18"])
def test_averages_are_sent_once_a_step(recipe: str, tiny: Make, tmp_path: Path) -> None:
    """However many passes a step takes; and what is sent are the gradients themselves."""
    for rows in (1, 2):  # of the two that each rank has
        words = (f"machine.microbatch={rows}", "machine.share_gradients=false")
        config = tiny(FOUR, *words, recipe=recipe)
        on_ranks(2, jobs.count_what_is_averaged, tmp_path, config, tmp_path)
        for rank in (0, 1):
            sent = json.loads((tmp_path / f"sent-{rank}.json").read_text())
            assert sent["passes"] == [2 // rows] * config.steps
            assert sent["bytes"] == [sent["of_gradients"]] * config.steps
            assert sent["copied"] == 0


@pytest.mark.parametrize("recipe", ["modern", "record-18"])
def test_gradients_go_once_a_step_to_who_needs_them(
    recipe: str, tiny: Make, tmp_path: Path
) -> None:
    """Of what two ranks share out each sends the other's half, of all else everything."""
    for rows in (1, 2):  # of the two that each rank has
        config = tiny(FOUR, TABLES, f"machine.microbatch={rows}", recipe=recipe)
        model = without_storage(config, Dataset.open(Path(config.data.dir)).vocab_size)
        on_ranks(2, jobs.count_what_is_shared_out, tmp_path, config, tmp_path)
        shared = small = 0
        for _, param, role in model.named_roles():
            by_muon = config.optimizer.kind == "muon" and role in MATRIX_ROLES
            if by_muon or (param.ndim == 2 and param.numel() >= SHARED_NUMEL):
                shared += param.nbytes
            else:
                small += param.nbytes
        assert shared > 2 * small
        for rank in (0, 1):
            sent = json.loads((tmp_path / f"sent-{rank}.json").read_text())
            assert sent["passes"] == [2 // rows] * config.steps
            assert sent["everywhere"] == [small] * config.steps
            # Rows that do not divide by two, and blocks without a partner, are filled up.
            assert sent["shares"] == [pytest.approx(shared / 2, rel=0.15)] * config.steps
            assert sent["shares"][0] >= shared / 2


def test_what_the_records_gained_time_by_changes_no_bit(tiny: Make, tmp_path: Path) -> None:
    """Each technique of the step itself can be switched off, to be raced."""
    off = ("machine.bucket_views=false", "machine.overlap_gathers=false", "machine.pinned=false",
           "machine.prefetch=0")  # fmt: skip
    kinds = {"on": (), "off": off, "averaged": (*off, "machine.share_gradients=false")}
    for name, words in kinds.items():
        config = tiny(*LONGER, TABLES, "machine.microbatch=1", *words, recipe="record-18")
        on_ranks(2, jobs.train, tmp_path, config, tmp_path / name)
        assert losses(tmp_path / "on") == losses(tmp_path / name)
        assert same_bits(tensors(tmp_path / "on"), tensors(tmp_path / name))
    on_ranks(2, jobs.count_what_is_averaged, tmp_path, config, tmp_path)
    sent = json.loads((tmp_path / "sent-0.json").read_text())
    assert sent["copied"] > 0, "without views there is a copy to send from"


def test_validation_is_equal_for_one_two_and_three_ranks(tiny: Make, tmp_path: Path) -> None:
    """Seven batches, which neither two nor three ranks share equally."""
    config = tiny("batch.tokens=384", "machine.microbatch=1", "validation.tokens=448")
    results = []
    for size in (1, 2, 3):
        on_ranks(size, jobs.measure_validation, tmp_path, config, tmp_path)
        results += [
            json.loads((tmp_path / f"validation-{size}-{rank}.json").read_text())
            for rank in range(size)
        ]
    assert results == [results[0]] * 6  # to the last bit
    assert results[0][2] == 448


@pytest.mark.parametrize(("recipe", "step"), [("modern", 1), ("record-18", 4)])
def test_a_nan_on_one_rank_changes_no_parameter_on_any(
    tiny: Make, tmp_path: Path, recipe: str, step: int
) -> None:
    config = tiny(FOUR, TABLES, "optimizer.clip=0.5", recipe=recipe)
    on_ranks(2, jobs.train_with_a_nan, tmp_path, config, tmp_path, step)

    def state(rank: int, number: int) -> dict[str, torch.Tensor]:
        return load_file(tmp_path / f"rank-{rank}-step-{number}.safetensors")

    for number in range(1, 9):
        facts = [(tmp_path / f"rank-{r}-step-{number}.json").read_text() for r in (0, 1)]
        assert facts[0] == facts[1]
        finite, loss = json.loads(facts[0])
        assert finite == (number != step)
        assert (loss is None) == (number == step)
        assert same_bits(state(0, number), state(1, number))
        if number > 1:
            assert same_bits(state(0, number), state(0, number - 1)) == (number == step)
    run = RunFolder(tmp_path / "run")
    assert values(run.path, "nonfinite") == [step]
    assert run.read_metrics("train")[step - 1]["loss"] is None
    assert json.loads(run.summary.read_text())["steps"] == 8


def test_ranks_give_up_together_with_one_report(tiny: Make, tmp_path: Path) -> None:
    on_ranks(2, jobs.give_up, tmp_path, tiny(), tmp_path)
    report = (tmp_path / "report").read_text()
    assert "not finite in 3 steps in a row" in report
    assert "no checkpoint to go back to" in report


def test_a_mistake_on_one_rank_ends_all_without_a_hang(tiny: Make, tmp_path: Path) -> None:
    on_ranks(2, jobs.fail_before_training, tmp_path, tiny(), tmp_path)  # fails if a rank hangs
    assert not (tmp_path / "run").exists()  # nothing half-made


def words(dataset: Path, folder: Path, *more: str) -> list[str]:
    return [
        "train", "modern", "--run-dir", str(folder), "--sample-tokens", "0", *TINY,
        f"data.dir={dataset}", *more,
    ]  # fmt: skip


def two_ranks(dataset: Path, folder: Path, *more: str) -> subprocess.Popen[str]:
    """A run without end, once it has begun to train."""
    job = subprocess.Popen(
        [sys.executable, "-m", "speedrun",
         *words(dataset, folder, "train.steps=100000", "--ranks", "2", *more)],
        env=ENV, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    wait_for(lambda: steps_logged(folder) > 2, "a step")
    return job


@pytest.mark.slow
def test_a_dead_rank_takes_the_job_down(tiny_dataset: Path, tmp_path: Path) -> None:
    job = two_ranks(tiny_dataset, tmp_path / "run")
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    # Of two that end at once, torchrun may name either: rank 0 waits until it knows of rank 1.
    os.kill(int(children[0]), signal.SIGSTOP)
    os.kill(int(children[1]), signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{children[1]}").exists(), "torchrun's notice")
    os.kill(int(children[0]), signal.SIGCONT)
    _, errors = job.communicate(timeout=PATIENCE)  # gloo itself would wait for half an hour
    assert job.returncode == 1
    assert "rank 1 ended first, with signal 9" in errors
    # Awake again, it finds rank 1 gone, or torchrun's signal to end before it has looked.
    noticed = "rank 0 stops because another rank has gone" in errors
    assert noticed or re.search(r"closing signal SIGTERM", errors)
    assert "Traceback" not in errors


@pytest.mark.slow
def test_signals_to_the_parent_reach_the_ranks(tiny_dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = two_ranks(tiny_dataset, folder, "--max-restarts", "1")
    run = RunFolder(folder)
    job.send_signal(signal.SIGUSR1)
    # The ranks may be a step apart when the signal meets them, and save twice.
    wait_for(lambda: len(run.read_metrics("checkpoint")) > 0, "a checkpoint")
    saved = steps_logged(folder)
    wait_for(lambda: steps_logged(folder) > saved, "another step")
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=PATIENCE)
    assert job.returncode == 143, errors
    assert "Traceback" not in errors
    summary = run.read_summary()
    assert summary is not None
    assert summary.exit_code == 143
    assert run.read_metrics("checkpoint")[-1]["step"] == summary.steps
    assert run.read_metrics("resume") == []  # a requested stop is no reason to start again


@pytest.mark.slow
def test_torchrun_itself_starts_ranks(tiny: Make, tiny_dataset: Path, tmp_path: Path) -> None:
    on_ranks(2, jobs.train, tmp_path, tiny(), tmp_path / "ours")
    start = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "speedrun"]
    done = subprocess.run(
        [*start, *words(tiny_dataset, tmp_path / "theirs")],
        env=ENV, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 x 1 threads" in done.stdout
    assert losses(tmp_path / "theirs") == losses(tmp_path / "ours")


Hosts = list[tuple[list[str], str, str]]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts as (command prefix, address, interface): network namespaces joined by a cable."""
    names = [f"speedrun-{os.getpid()}-{side}" for side in "ab"]
    cable = [f"sr{os.getpid() % 100000}{side}" for side in "ab"]

    def ip(*words: str, check: bool = True) -> None:
        subprocess.run(["ip", *words], check=check, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cable[0], "netns", names[0], "type", "veth",
           "peer", "name", cable[1], "netns", names[1])  # fmt: skip
        for number, (name, end) in enumerate(zip(names, cable, strict=True), 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("netns", "exec", name, "true")
        found = [
            (["ip", "netns", "exec", name], f"10.77.0.{number}", end)
            for number, (name, end) in enumerate(zip(names, cable, strict=True), 1)
        ]
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"NOT TESTED: two hosts, since network namespaces cannot be made: {error}")
    else:
        yield found
    finally:
        if shutil.which("ip"):
            for name in names:
                ip("netns", "del", name, check=False)


@pytest.mark.slow
def test_two_hosts_train_one_model(
    tiny: Make, tiny_dataset: Path, tmp_path: Path, hosts: Hosts
) -> None:
    """torchrun's rendezvous of two agents; on two hosts these reach each other by address alone."""
    on_ranks(2, jobs.train, tmp_path, tiny(), tmp_path / "one-host")
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    agents = [
        subprocess.Popen(
            [*prefix, *TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1",
             "--rdzv-backend", "c10d", "--rdzv-id", "test",
             "--rdzv-endpoint", f"{hosts[0][1]}:{port}",
             "--rdzv-conf", f"is_host={int(number == 0)}", "--local-addr", address,
             "-m", "speedrun", *words(tiny_dataset, tmp_path / "two-hosts")],
            env={**ENV, "GLOO_SOCKET_IFNAME": interface},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for number, (prefix, address, interface) in enumerate(hosts)
    ]  # fmt: skip
    outputs = [agent.communicate(timeout=PATIENCE)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    assert losses(tmp_path / "two-hosts") == losses(tmp_path / "one-host")
    assert json.loads((tmp_path / "two-hosts/summary.json").read_text())["world_size"] == 2
