"""What ranks do in the tests of this folder, in processes that `children` starts."""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from speedrun.config.schema import Config
from speedrun.data.loader import Batch
from speedrun.errors import DataError, RunError
from speedrun.train import scatter
from speedrun.train.health import Outcome
from speedrun.train.log import Display
from speedrun.train.request import Request
from speedrun.train.run import RunFolder
from speedrun.train.session import run_training
from speedrun.train.trainer import Trainer
from speedrun.train.world import World


def train(world: World, config: Config, folder: Path, how: dict[str, Any] | None = None) -> None:
    data = Path(config.data.dir)
    run_training(config, RunFolder(folder), data, Display(), world, Request(**(how or {})))


def count_what_is_averaged(world: World, config: Config, folder: Path) -> None:
    """Bytes of gradients that go to all other ranks, and forward passes, of every step."""
    passes: list[int] = []
    sizes: list[int] = []
    of_gradients = copied = 0
    share, loss_of, both = Trainer.share_gradients, Trainer.training_loss, Trainer.forward_backward
    buckets: list[Tensor] = []

    def kept(group: Any, bucket: Any) -> Any:
        buckets.append(bucket.buffer())
        return allreduce_hook(group, bucket)

    kept.__annotations__.clear()  # DDP compares them with its own classes, and these are texts

    def shared(self: Trainer) -> None:
        share(self)
        assert isinstance(self.parallel, DistributedDataParallel)
        self.parallel.register_comm_hook(dist.group.WORLD, kept)

    def counted(self: Trainer, batch: Batch) -> Tensor:
        passes[-1] += 1
        return loss_of(self, batch)

    def watched(self: Trainer, batch: Batch) -> Tensor:
        nonlocal of_gradients, copied
        passes.append(0)
        buckets.clear()
        total = both(self, batch)
        sizes.append(sum(one.nbytes for one in buckets))
        sent = {one.untyped_storage().data_ptr() for one in buckets}
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        of_gradients = sum(grad.nbytes for grad in gradients)
        copied += sum(grad.untyped_storage().data_ptr() not in sent for grad in gradients)
        return total

    Trainer.share_gradients = shared  # type: ignore[method-assign]
    Trainer.training_loss = counted  # type: ignore[method-assign]
    Trainer.forward_backward = watched  # type: ignore[method-assign]
    train(world, config, folder / "run", {"warm_up": False})
    found = {"passes": passes, "bytes": sizes, "of_gradients": of_gradients, "copied": copied}
    (folder / f"sent-{world.rank}.json").write_text(json.dumps(found))
    if world.first:  # who is writing there until now
        shutil.rmtree(folder / "run")


def count_what_is_shared_out(world: World, config: Config, folder: Path) -> None:
    """Bytes of this rank's gradients that other ranks own, or all do, and passes, of every step."""
    passes: list[int] = []
    shares: list[int] = []
    everywhere: list[int] = []
    loss_of, both = Trainer.training_loss, Trainer.forward_backward
    send, add_up = scatter._send, dist.all_reduce

    def sent(mine: Tensor, received: Tensor) -> Any:
        shares[-1] += mine.nbytes - received.nbytes
        return send(mine, received)

    def added_up(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        everywhere[-1] += tensor.nbytes
        return add_up(tensor, *arguments, **named)

    def counted(self: Trainer, batch: Batch) -> Tensor:
        passes[-1] += 1
        return loss_of(self, batch)

    def watched(self: Trainer, batch: Batch) -> Tensor:
        for found in (passes, shares, everywhere):
            found.append(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scatter, "_send", sent)
            patch.setattr(dist, "all_reduce", added_up)
            return both(self, batch)

    Trainer.training_loss = counted  # type: ignore[method-assign]
    Trainer.forward_backward = watched  # type: ignore[method-assign]
    train(world, config, folder / "run", {"warm_up": False})
    found = {"passes": passes, "shares": shares, "everywhere": everywhere}
    (folder / f"sent-{world.rank}.json").write_text(json.dumps(found))
    if world.first:  # who is writing there until now
        shutil.rmtree(folder / "run")


def spoil(world: World, rank: int, steps: set[int]) -> None:
    """From now on, training losses of `rank` are NaN at these calls, counted from 1."""
    honest, calls = Trainer.training_loss, 0

    def spoilt(self: Trainer, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        here = world.rank == rank and calls in steps
        return honest(self, batch) * (math.nan if here else 1.0)

    Trainer.training_loss = spoilt  # type: ignore[method-assign]


@contextmanager
def no_waiting() -> Iterator[None]:
    honest = Trainer.__init__

    def patched(self: Trainer, *arguments: Any, **named: Any) -> None:
        honest(self, *arguments, **named)
        self.waits = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "__init__", patched)
        yield


def train_and_meet(
    world: World,
    config: Config,
    folder: Path,
    rank: int,
    steps: set[int],
    stop_in: int,
    how: dict[str, Any],
) -> None:
    """Nobody waits; `rank` meets NaNs at these steps and is asked to end in the backward of one."""
    spoil(world, rank, steps)
    loss_of = Trainer.training_loss

    def asked(self: Trainer, batch: Batch) -> Tensor:
        if world.rank == rank and self.progress.batch == stop_in:
            signal.raise_signal(signal.SIGTERM)
        return loss_of(self, batch)

    Trainer.training_loss = asked  # type: ignore[method-assign]
    with no_waiting():
        train(world, config, folder, how | {"warm_up": False})


def train_with_a_nan(world: World, config: Config, folder: Path, step: int) -> None:
    """Rank 1 meets a NaN at `step`; every rank writes its weights and moments at every step."""
    spoil(world, 1, {step})
    outcomes_of = Trainer.outcomes

    def recorded(self: Trainer, *, everything: bool = False) -> Iterator[Outcome]:
        del everything
        for outcome in outcomes_of(self, everything=True):
            tensors = {**self.model.state_dict(), **self.optimizer.export_state()}
            save_file(tensors, folder / f"rank-{world.rank}-step-{outcome.step}.safetensors")
            facts = json.dumps([outcome.finite, None if math.isnan(outcome.loss) else outcome.loss])
            (folder / f"rank-{world.rank}-step-{outcome.step}.json").write_text(facts)
            yield outcome

    Trainer.outcomes = recorded  # type: ignore[method-assign]
    train(world, config, folder / "run", {"warm_up": False})


def give_up(world: World, config: Config, folder: Path) -> None:
    """Rank 1 meets nothing but NaN: all ranks give up together, and rank 0 says why."""
    spoil(world, 1, set(range(1, 100)))
    with pytest.raises(RunError if world.first else SystemExit) as caught:
        train(world, config, folder / "run", {"warm_up": False})
    if world.first:
        (folder / "report").write_text(str(caught.value))


def fail_before_training(world: World, config: Config, folder: Path) -> None:
    """Rank 1 has no dataset: it says so, and rank 0 ends quietly instead of waiting for it."""
    data = folder / "none" if world.rank == 1 else Path(config.data.dir)
    run = RunFolder(folder / "run")
    with pytest.raises(DataError if world.rank == 1 else SystemExit):
        run_training(config, run, data, Display(), world, Request())


def measure_validation(world: World, config: Config, folder: Path) -> None:
    """The untrained model, its head made random: every batch has another loss."""
    with torch.no_grad():
        trainer = Trainer(config, world, Path(config.data.dir))
        torch.nn.init.normal_(trainer.model.head.weight)  # type: ignore[union-attr]
        with trainer.loader:
            result = trainer.validate()
    numbers = [result.loss, result.bits_per_byte, result.tokens]
    (folder / f"validation-{world.size}-{world.rank}.json").write_text(json.dumps(numbers))


def talk(world: World, folder: Path) -> None:
    """The words ranks have for each other."""
    assert world.sum([world.rank, 1.0]) == [sum(range(world.size)), world.size]
    assert world.gather(world.rank + 0.5) == [rank + 0.5 for rank in range(world.size)]
    assert world.from_first(7 if world.first else 99) == 7
    text = "runs/ä b" if world.first else "other"
    assert world.text_from_first(text) == "runs/ä b"
    world.barrier()
