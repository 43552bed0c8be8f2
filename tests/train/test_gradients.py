"""Gradients that ranks are sent: those of what they update, against the average of all."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from speedrun.optim import AdamOptions, CombinedOptimizer, MuonOptions
from speedrun.train import scatter
from speedrun.train.gradients import Gradients, SharedGradients
from speedrun.train.scatter import Scatter
from speedrun.train.world import World
from tests.train.children import on_ranks


class Net(nn.Module):
    """Matrices that do not divide by any number of ranks, tables that do and do not, and scalars.

    `aside` is left out of the loss where it is told so, `frozen` has no gradient at all.
    """

    roles = {  # noqa: RUF012
        "wide.0": "hidden", "wide.1": "hidden", "wide.2": "hidden", "tall": "hidden",
        "fused": "qkv", "frozen": "hidden", "aside": "hidden", "even": "table", "odd": "table",
        "rough": "table", "gain": "scalar", "bias": "scalar",
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)

        def made(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=g).to(dtype))

        self.wide = nn.ParameterList([made(12, 40) for _ in range(3)])
        self.tall, self.fused, self.aside = made(40, 12), made(24, 8), made(9, 9)
        self.frozen = made(12, 40).requires_grad_(False)
        self.even, self.odd = made(240, 96), made(241, 97)
        self.rough = made(241, 96, dtype=torch.bfloat16)
        self.gain, self.bias = made(20), made(7)

    def forward(self, x: Tensor, without: bool) -> Tensor:
        """A loss in which the gradient of every number is another one."""
        total = x.new_zeros(())
        for number, (name, param) in enumerate(self.named_parameters()):
            if without and name == "aside":
                continue
            weights = torch.linspace(-1, 1, param.numel()).view_as(param)
            total = total + (param.float() * (weights * x[number] + x[0]).cos()).sum() / 7
        return total


def optimizer_of(net: Net) -> CombinedOptimizer:
    rules: dict[str, Any] = {
        "hidden": MuonOptions(lr=0.02),
        "qkv": {"kind": "muon", "lr": 0.02, "split_rows": (16, 4, 4)},
        "table": AdamOptions(lr=0.01),
        "scalar": AdamOptions(lr=0.01),
    }
    named = [(name, param, net.roles[name]) for name, param in net.named_parameters()]
    return CombinedOptimizer(named, rules)


def compare(world: World, views: bool) -> None:
    net, slow = Net(), Net()
    optimizer = optimizer_of(net)
    parallel = DistributedDataParallel(
        net, gradient_as_bucket_view=views, find_unused_parameters=True, bucket_cap_mb=0.01
    )
    shared = SharedGradients(parallel, optimizer)
    assert shared.split
    assert shared.divisor == world.size
    twin = Gradients(slow)
    for step in range(4):  # DDP orders its buckets anew after the first
        without = step == 2
        x = torch.randn(20, generator=torch.Generator().manual_seed(100 * step + world.rank))
        for passes in (0, 1):  # gradients of a pass that sends nothing stay
            with nullcontext() if passes else parallel.no_sync():
                (parallel(x, without) / shared.divisor).backward()
            (slow(x, without) / world.size).backward()
        shared.arrive()
        for param in slow.parameters():
            if param.grad is not None:
                wide = param.grad.float()
                dist.all_reduce(wide)
                param.grad = wide.to(param.dtype)
        expected = dict(slow.named_parameters())
        seen = 0
        for block in optimizer.blocks:
            found, twins = block.gradient(), expected[block.name].grad
            if twins is None:
                assert found is None, block.name
                continue
            counts_steps = [*block.slots] == [
                "step"
            ]  # of a table whose rows are blocks by themselves
            if block.owner in (None, world.rank) and not counts_steps:
                assert found is not None
                far = 2e-2 if found.dtype == torch.bfloat16 else 1e-6
                tiles = block.block.as_tiles(twins)
                torch.testing.assert_close(found, tiles, rtol=far, atol=far)
                assert found.dtype == block.param.dtype
                seen += 1
        assert seen >= 2
        check_norm(world, shared, twin)
        net.zero_grad()
        slow.zero_grad()


def check_norm(world: World, shared: SharedGradients, twin: Gradients) -> None:
    """Each gradient is counted by one rank."""
    squares = shared.norm().double().square()
    dist.all_reduce(squares)
    torch.testing.assert_close(squares.sqrt().float(), twin.norm(), rtol=1e-3, atol=0)
    before = shared.norm()
    limit = float(before) / 3
    shared.clip(before, limit)  # as on a GPU, by a tensor
    torch.testing.assert_close(shared.norm(), torch.tensor(limit), rtol=1e-2, atol=0)
    shared.clip(limit, limit * 3)  # which it keeps already
    torch.testing.assert_close(shared.norm(), torch.tensor(limit), rtol=1e-2, atol=0)


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_has_the_gradients_of_what_it_updates(
    size: int, views: bool, tmp_path: Path
) -> None:
    on_ranks(size, compare, tmp_path, views)


def send_while_the_backward_goes_on(world: World) -> None:
    net = Net()
    parallel = DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=0.01)
    shared = SharedGradients(parallel, optimizer_of(net))
    to_come: list[int] = []
    send = scatter._send

    def noted(sent: Tensor, received: Tensor) -> Any:
        to_come.append(sum(p.grad is None for p in net.parameters() if p.requires_grad))
        return send(sent, received)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scatter, "_send", noted)
        for _ in range(2):
            to_come.clear()
            parallel(torch.ones(20), False).backward()
            shared.arrive()
            assert len(to_come) >= 6
            assert to_come[0] > to_come[-1], "the first are sent before the last are there"
            net.zero_grad()


def test_gradients_are_sent_while_others_are_computed(tmp_path: Path) -> None:
    on_ranks(2, send_while_the_backward_goes_on, tmp_path)


def send_what_lies_in_order(world: World) -> None:
    """A table whose rows divide by the ranks is sent from where its gradient is."""
    net = Net()
    optimizer = optimizer_of(net)
    tables = {blocks[0].name: blocks for blocks in optimizer.shares() if len(blocks) == world.size}
    grads = {name: torch.randn(getattr(net, name).shape) for name in ("even", "odd")}
    for name, direct in (("even", True), ("odd", False)):
        one = Scatter(tables[name])
        one.add(getattr(net, name), grads[name])
        assert one._sent is not None
        assert (one._sent.data_ptr() == grads[name].data_ptr()) == direct
        one.arrive()
        total = grads[name].clone()
        dist.all_reduce(total)
        [block] = [block for block in tables[name] if block.owner == world.rank]
        assert block.shard is not None
        torch.testing.assert_close(block.shard, block.block.as_tiles(total))


def test_no_copy_is_made_of_what_lies_in_order(tmp_path: Path) -> None:
    on_ranks(2, send_what_lies_in_order, tmp_path)


def test_one_rank_has_them_all() -> None:
    model = nn.Linear(3, 2)
    gradients = Gradients(model)
    assert (gradients.split, gradients.divisor) == (False, 1)
    assert gradients.norm() == 0
    model(torch.ones(1, 3)).sum().backward()
    assert gradients.norm() == pytest.approx(math.sqrt(8))
    gradients.arrive()
    gradients.clip(math.sqrt(8), 1.0)
    assert gradients.norm() == pytest.approx(1.0)
    assert [one.shape for one in gradients.parts()] == [(2, 3), (2,)]
