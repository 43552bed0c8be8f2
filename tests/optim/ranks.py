"""What the four gloo ranks of test_distributed.py do: they check what only they can see."""

import copy
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from speedrun.optim import (
    AdamOptions,
    CombinedOptimizer,
    Muon,
    MuonOptions,
    NonFiniteGradientError,
    OptimError,
    buckets,
    orthogonalize,
)
from tests.optim import test_muon
from tests.optim.tables import TABLES, make_adam, make_tables, train_tables
from tests.optim.test_base import RowMuon
from tests.optim.test_muon import set_grads, train
from tests.waiting import PATIENCE

RANKS = 4
# 7 squares, 3 wide and 2 tall ones do not all divide by 2, 3 or 4; one shape is alone; 4 of the
# fused kind are split unequally. Squares have weight decay, the one alone a cautious one, and all
# others the state of NorMuon.
SHAPES = [(16, 16)] * 7 + [(12, 40), (40, 12), (12, 40), (40, 12), (12, 40)] + [(9, 9)]
FUSED = [(24, 8)] * 4


def make_params() -> list[Parameter]:
    return test_muon.make_params(SHAPES + FUSED)


def make_muon(params: list[Parameter], group: Any = None) -> Muon:
    named = [(f"w{i}", p) for i, p in enumerate(params)]
    groups: list[dict[str, Any]] = [
        {"params": named[:7], "weight_decay": 0.1},
        {"params": named[7:12], "neuron_beta": 0.9},
        {"params": named[12:13], "weight_decay": 0.1, "cautious": True},
        {"params": named[13:], "split_rows": (16, 4, 4), "neuron_beta": 0.9},
    ]
    return Muon(groups, lr=0.05, process_group=group)


def flat(params: list[Parameter]) -> Tensor:
    return torch.cat([p.detach().view(-1).float() for p in params])


def fingerprint_is_shared(params: list[Parameter], group: Any) -> None:
    """Every rank of the group holds the same bits."""
    mine = flat(params)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    assert all(torch.equal(mine, other) for other in everyone)


# What each rank runs.


def check_world(rank: int, world: int, group: Any, folder: Path) -> None:
    params = make_params()
    muon = make_muon(params, group)
    for block in muon.blocks:
        assert list(block.state) == (list(block.slots) if block.owner == rank else [])
        assert len(block.slots) == (2 if block.group["neuron_beta"] else 1)
    counts = [sum(block.owner == r for block in muon.blocks[:7]) for r in range(world)]
    assert max(counts) - min(counts) <= 1

    train(muon, params, range(3))
    state = copy.deepcopy(muon.state_dict())
    middle = copy.deepcopy(params)
    train(muon, params, range(3, 6))
    fingerprint_is_shared(params, group)
    if rank == 0:
        torch.save(
            {"state": state, "middle": [p.detach() for p in middle]}, folder / f"at3.{world}"
        )
        torch.save(flat(params), folder / f"at6.{world}")

    set_grads(params, 6)
    assert params[2].grad is not None
    params[2].grad[0, 0] = math.nan
    weights, before = flat(params), muon.export_state()
    with pytest.raises(NonFiniteGradientError, match="w2 holds"):
        muon.step()
    assert torch.equal(weights, flat(params))
    assert all(torch.equal(before[key], tensor) for key, tensor in muon.export_state().items())

    set_grads(params, 7)
    left_out = [5, 8, 12, 14]
    for i in left_out:
        params[i].grad = None
    kept = [params[i].detach().clone() for i in left_out]
    muon.step()
    assert all(torch.equal(params[i], weight) for i, weight in zip(left_out, kept, strict=True))
    after = muon.export_state()
    for key, tensor in before.items():
        same = int(key.partition(":")[0].removeprefix("w")) in left_out
        assert torch.equal(tensor, after[key]) == same
    fingerprint_is_shared(params, group)


def check_slots_of_any_shape(rank: int, world: int, group: Any) -> None:
    """What every rank gathers is what the owners hold, whatever the shape of the slot."""
    params = make_params()
    muon = RowMuon([(f"w{i}", p) for i, p in enumerate(params)], process_group=group)
    for number, block in enumerate(muon.blocks):
        for slot, tensor in block.state.items():
            assert block.owner == rank
            tensor.copy_(torch.full(tensor.shape, number + len(slot) / 10))
    saved = muon.export_state()
    for number, param in enumerate(params):
        shapes = {"momentum": tuple(param.shape), "row": (param.shape[0], 1), "count": ()}
        for slot, shape in shapes.items():
            assert torch.equal(
                saved[f"w{number}:{slot}"], torch.full(shape, number + len(slot) / 10)
            )
    again = RowMuon([(f"w{i}", p) for i, p in enumerate(params)], process_group=group)
    again.import_state(saved)
    assert all(torch.equal(saved[key], tensor) for key, tensor in again.export_state().items())
    assert len({block.owner for block in muon.blocks}) == world


def check_copies(group: Any) -> None:
    """A copy goes on alone in the default group; one that would own other matrices is refused."""
    params = make_params()
    muon = make_muon(params)
    train(muon, params, range(2))
    both = copy.deepcopy({"params": params, "muon": muon})
    train(muon, params, range(2, 3))
    train(both["muon"], both["params"], range(2, 3))  # type: ignore[arg-type]
    assert torch.equal(flat(params), flat(both["params"]))  # type: ignore[arg-type]
    if group is not None and dist.get_rank(group) >= 0:
        with pytest.raises(OptimError, match="over 2 ranks, not 4"):
            copy.deepcopy(make_muon(make_params(), group))


def check_share_of_state() -> None:
    """Where every shape divides by the ranks, each holds exactly its share of the floats."""
    shapes = [(16, 16)] * 8 + [(12, 40), (40, 12)] * 4
    muon = Muon([Parameter(torch.zeros(shape)) for shape in shapes])
    assert muon.state_bytes() * RANKS == 4 * (8 * 16 * 16 + 8 * 12 * 40)


def check_resume(world: int, group: Any, folder: Path) -> None:
    """Go on from what four ranks saved."""
    saved = torch.load(folder / "at3.4", weights_only=True)
    params = [Parameter(w) for w in saved["middle"]]
    muon = make_muon(params, group)
    muon.load_state_dict(saved["state"])
    train(muon, params, range(3, 6))
    fingerprint_is_shared(params, group)
    torch.save(flat(params), folder / f"resumed.{world}")


def check_tables(world: int, group: Any, of_one: Any, folder: Path) -> None:
    """Every rank has its share of the moments, and all come to what one comes to.

    To the bit where rows are whole vectors: a CPU rounds the last few numbers of what it is given
    in another way, and of `odd` that are others.
    """
    alone, tables = make_tables(), make_tables()
    single, adam = make_adam(alone, of_one), make_adam(tables, group)
    shared = {block.name for block in adam.blocks if block.owner is not None}
    assert shared == {"even", "odd", "half"} | ({"few rows"} if world <= 3 else set())
    held = sum(math.prod(TABLES[name][0]) for name in shared) * 8 / world
    everywhere = sum(math.prod(shape) * 8 for name, (shape, _) in TABLES.items()
                     if name not in shared)  # fmt: skip
    most = 8 * world * sum(math.prod(TABLES[name][0][1:]) for name in shared)  # some rows each
    assert abs(adam.state_bytes() - held - everywhere) <= most

    def same() -> None:
        fingerprint_is_shared([*tables.values()], group)
        found, expected = ({**adam.export_state(), **tables}, {**single.export_state(), **alone})
        assert found.keys() == expected.keys()
        for key, tensor in found.items():
            if key.startswith("odd"):
                torch.testing.assert_close(tensor, expected[key], rtol=1e-6, atol=1e-9)
            else:
                assert torch.equal(tensor, expected[key]), key

    train_tables(adam, tables, range(6))
    train_tables(single, alone, range(6))
    same()
    state = adam.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, folder / f"tables.{world}")
    adam = make_adam(tables, group)
    adam.import_state(single.export_state())
    train_tables(adam, tables, range(6, 10))
    train_tables(single, alone, range(6, 10))
    same()


class Watched:
    """A gather that says when it is waited for."""

    def __init__(self, work: Any, events: list[str]) -> None:
        self.work, self.events = work, events

    def wait(self) -> None:
        self.events.append("wait")
        self.work.wait()


def check_wire_of_another_type(group: Any, folder: Path) -> None:
    """fp64 stands for bf16: state and gradients are fp32, updates travel as the other type."""
    params = make_params()
    muon = Muon(params, dtype=torch.float64, process_group=group)
    train(muon, params, range(3))
    fingerprint_is_shared(params, group)
    torch.save(flat(params), folder / "double")


def check_no_buffers_are_made(group: Any) -> None:
    """gloo allocates inside its own gather, so a copy within the rank stands in for it here."""
    params = [Parameter(torch.randn(96, 96)) for _ in range(5)]
    muon = Muon(params, process_group=group)
    buffers: list[tuple[int, int]] = []

    def stand_in(received: Tensor, sent: Tensor, _: Any) -> Done:
        buffers.append((received.data_ptr(), sent.data_ptr()))
        received.view(2, -1).copy_(sent)
        return Done()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("speedrun.optim.muon.all_gather", stand_in)
        train(muon, params, range(2))
        set_grads(params, 2)
        with torch.profiler.profile(profile_memory=True) as profile:
            muon.step()
    events = list(profile.events() or [])
    assert len(events) > 20
    assert max(event.self_cpu_memory_usage for event in events) < 96 * 96 * 4 / 10
    assert len(buffers) == 9
    assert len({received for received, _ in buffers}) == 1
    assert [sent for _, sent in buffers[:3]] * 3 == [sent for _, sent in buffers]
    assert len({sent for _, sent in buffers}) == 2


class Done:
    def wait(self) -> None:
        pass


def check_overlap(folder: Path, rank: int) -> None:
    """What a step of eight buckets does, in order."""
    events: list[str] = []
    gather = buckets.all_gather

    def sent(*args: Any, **kwargs: Any) -> Watched:
        events.append("send")
        return Watched(gather(*args, **kwargs), events)

    def computed(*args: Any, **kwargs: Any) -> Tensor:
        events.append("compute")
        return orthogonalize(*args, **kwargs)

    params = [Parameter(torch.randn(8 + i, 8 + i)) for i in range(8) for _ in range(RANKS)]
    before = [param.detach().clone() for param in params]
    muon = Muon(params)
    assert len(muon.buckets) == 8
    set_grads(params, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("speedrun.optim.muon.orthogonalize", computed)
        patch.setattr("speedrun.optim.muon.all_gather", sent)
        muon.step()
        (folder / f"events.{rank}").write_text(" ".join(events))
        events.clear()
        waiting = [Parameter(w.clone()) for w in before]
        patient = Muon(waiting, overlap=False)
        set_grads(waiting, 0)
        patient.step()
    (folder / f"waiting.{rank}").write_text(" ".join(events))
    assert all(torch.equal(a, b) for a, b in zip(params, waiting, strict=True))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu()) - x
        return y.square().mean()


def combined(net: Net, group: Any = None) -> CombinedOptimizer:
    roles = {"up.weight": "hidden", "down.weight": "hidden", "up.bias": "scalar"}
    rules = {"hidden": MuonOptions(lr=0.02), "scalar": AdamOptions(lr=0.01)}
    return CombinedOptimizer(
        [(n, p, roles[n]) for n, p in net.named_parameters()], rules, process_group=group
    )


def ddp_steps(rank: int, world: int, group: Any, pieces: int) -> tuple[Net, CombinedOptimizer]:
    """Three steps on the same 16 rows each, cut into world x pieces microbatches."""
    net = Net()
    optimizer = combined(net, group)
    model = (
        DistributedDataParallel(net, process_group=group, gradient_as_bucket_view=True)
        if world > 1
        else net
    )
    for step in range(3):
        rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        share = rows.chunk(world)[rank].chunk(pieces)
        for i, piece in enumerate(share):
            if isinstance(model, DistributedDataParallel) and i + 1 < pieces:
                with model.no_sync():
                    (model(piece) / pieces).backward()
            else:
                (model(piece) / pieces).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=PATIENCE),
    )
    try:
        groups = {2: dist.new_group([0, 1]), 3: dist.new_group([0, 1, 2]), 4: None}
        alone = [dist.new_group([each]) for each in range(RANKS)][rank]
        for world, group in groups.items():
            if rank < world:
                check_world(rank, world, group, folder)
                check_slots_of_any_shape(rank, world, group)
                check_tables(world, group, alone, folder)
        dist.barrier()
        for world in (2, 3):
            if rank < world:
                check_resume(world, groups[world], folder)
        if rank < 3:
            check_wire_of_another_type(groups[3], folder)
        if rank < 2:
            check_no_buffers_are_made(groups[2])
            for pieces in (1, 2, 4):
                net, optimizer = ddp_steps(rank, 2, groups[2], pieces)
                fingerprint_is_shared(list(net.parameters()), groups[2])
                state = optimizer.export_state()
                if rank == 0:
                    torch.save((flat(list(net.parameters())), state), folder / f"ddp.{pieces}")
        dist.barrier()
        check_share_of_state()
        check_copies(groups[2] if rank < 2 else None)
        check_overlap(folder, rank)
        (folder / f"done.{rank}").touch()
    finally:
        dist.destroy_process_group()
