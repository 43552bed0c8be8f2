"""Optimizers of somebody else's: in ours like our own, exact in every bit, or refused in words."""

from __future__ import annotations

import copy
import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from speedrun.optim import AdamOptions, CombinedOptimizer, MuonOptions, OptimError
from speedrun.optim.foreign.values import same_bits
from tests.optim import foreign as toys
from tests.optim.test_combined import Net, same, tokens_at, train

OURS = {
    "hidden": MuonOptions(lr=0.02),
    "embedding": AdamOptions(lr=0.1),
    "head": AdamOptions(lr=0.01),
    "scalar": AdamOptions(lr=0.04),
}


def own(make: Any, scheduled: bool = True, random: bool = False, **args: Any) -> dict[str, Any]:
    flags = {"scheduled": scheduled, "random": random}
    return {"kind": "own", "make": make, "use": f"mine.py:{make.__name__}", "args": args, **flags}


def combined(net: Net, **roles: Any) -> CombinedOptimizer:
    return CombinedOptimizer(net.by_role(), {**OURS, **roles})


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tried out beforehand: what is left is what watches a run."""
    monkeypatch.setattr("speedrun.optim.combined.probe", lambda *_: None)


def test_is_its_parts_side_by_side() -> None:
    net, twin = Net(), Net()
    optimizer = combined(net, hidden=own(toys.SignMomentum, lr=0.003), scalar=own(torch.optim.SGD))
    train(net, optimizer, range(5))
    ours = [entry for entry in twin.by_role() if entry[2] not in ("hidden", "scalar")]
    parts: list[torch.optim.Optimizer] = [
        CombinedOptimizer(ours, OURS),
        toys.SignMomentum([twin.up.weight, twin.down.weight], lr=0.003),
        torch.optim.SGD([twin.gains]),
    ]
    for step in range(5):
        twin.zero_grad()
        twin.loss(tokens_at(step)).backward()  # type: ignore[no-untyped-call]
        for part in parts:
            part.step()
    same(net, twin)


def test_roles_that_say_the_same_share_one_with_a_group_each() -> None:
    use = own(toys.SignMomentum)
    optimizer = combined(Net(), hidden=use, head=use, scalar=own(toys.SignMomentum, lr=0.5))
    assert [one.roles for one in optimizer.foreign] == [("scalar",), ("hidden", "head")]
    alone, shared = optimizer.foreign
    assert [len(group["params"]) for group in shared.optimizer.param_groups] == [2, 1]
    assert [group["lr"] for group in alone.optimizer.param_groups] == [0.5]
    assert all(
        any(group is one for one in optimizer.param_groups)
        for foreign in optimizer.foreign
        for group in foreign.optimizer.param_groups
    )


def test_a_schedule_reaches_it_unless_it_schedules_itself() -> None:
    net = Net()
    optimizer = combined(
        net,
        hidden=own(toys.SignMomentum, lr=0.2),
        head=own(toys.Averaging, scheduled=False, lr=0.3),
        scalar=own(torch.optim.SGD, lr=torch.tensor(0.5), momentum=0.7),
    )
    optimizer.set_multiplier(0.25)
    optimizer.set_momentum(0.85)  # our Muon's, and not what SGD calls so
    scalar, hidden, head = (one.optimizer.param_groups[0] for one in optimizer.foreign)
    assert hidden["lr"] == 0.2 * 0.25
    assert (head["lr"], optimizer.foreign[2].scheduled) == (0.3, False)
    assert isinstance(scalar["lr"], torch.Tensor)
    assert float(scalar["lr"]) == 0.125
    assert scalar["momentum"] == 0.7


def test_plan_says_who_does_what_and_what_is_not_known_yet() -> None:
    net = Net()
    optimizer = combined(net, hidden=own(toys.SignMomentum, lr=0.2))
    assert {row.name: row for row in optimizer.plan()}["up.weight"].state_bytes is None
    [line] = [one for one in optimizer.plan_table().splitlines() if one.startswith("up.weight")]
    assert line.split() == ["up.weight", "hidden", "mine.py:SignMomentum", "0.2", "192", *["after", "a", "step"]]  # fmt: skip # noqa: E501
    before = optimizer.state_bytes()
    train(net, optimizer, range(1))
    plan = {row.name: row for row in optimizer.plan()}
    assert (plan["up.weight"].state_bytes, plan["up.weight"].lr) == (4 * 192, 0.2)
    assert optimizer.state_bytes() == before + 4 * 2 * 192
    assert sum(row.count for row in plan.values()) == sum(p.numel() for p in net.parameters())


CASES: dict[str, dict[str, Any]] = {
    "plain": {"hidden": own(toys.SignMomentum), "head": own(toys.SignMomentum)},
    "trees": {"hidden": own(toys.Trees, lr=0.001), "scalar": own(toys.Trees, lr=0.001)},
    "modes": {"hidden": own(toys.Averaging, scheduled=False), "head": own(toys.Averaging)},
    "modes aside": {"hidden": own(toys.AveragingAside)},
    "random": {"hidden": own(toys.Drawing, random=True), "scalar": own(toys.SignMomentum)},
    "closure": {"hidden": own(toys.Enclosed), "head": own(toys.Enclosed)},
    "scheduler": {"hidden": own(toys.InnerSchedule, scheduled=False)},
    "all": {role: own(torch.optim.AdamW, lr=0.003) for role in OURS},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("after", [0, 3])
def test_resume_is_exact_by_flat_tensors_and_by_state_dict(
    case: str, after: int, trusted: None
) -> None:
    straight, roles = Net(), CASES[case]
    through = combined(straight, **roles)
    train(straight, through, range(6))
    end = through.export_state()

    parted = Net()
    first = combined(parted, **roles)
    train(parted, first, range(after))
    weights, flat = copy.deepcopy(parted), save(first.export_state())
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    train(parted, first, range(after, 6))
    same(straight, parted)  # looking changes nothing

    # Into one made anew, and into one that has gone on: a rewind.
    fresh = copy.deepcopy(weights)
    second = combined(fresh, **roles)
    second.import_state(load(flat))
    parted.load_state_dict(weights.state_dict())
    first.import_state(load(flat))
    third_net = copy.deepcopy(weights)
    third = combined(third_net, **roles)
    file.seek(0)
    third.load_state_dict(torch.load(file, weights_only=True))
    for net, optimizer in ((fresh, second), (parted, first), (third_net, third)):
        train(net, optimizer, range(after, 6))
        same(straight, net)
        assert all(same_bits(tensor, end[k]) for k, tensor in optimizer.export_state().items())


def test_state_is_by_parameter_name_with_types_strides_and_shared_memory() -> None:
    net = Net()
    optimizer = combined(net, hidden=own(toys.Trees))
    train(net, optimizer, range(2))
    flat = optimizer.export_state()
    assert flat["up.weight:half"].dtype == torch.bfloat16
    assert flat["up.weight:half"].shape == (24, 8)
    assert flat["up.weight:window.held/1"].shape == (24, 8)
    assert flat["[hidden]:buffer"].tolist() == [4.0, 4.0]
    other = Net()
    twin = combined(other, hidden=own(toys.Trees))
    twin.import_state(flat)
    inner = twin.foreign[0].optimizer
    state = inner.state[other.up.weight]
    first, [second] = state["pair"]
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
    assert second.stride() == (1, 8)
    saved = optimizer.foreign[0].optimizer.state[net.up.weight]
    assert state["what"] == saved["what"]
    assert state["worst"] == saved["worst"]
    assert type(state["scale"]) is np.float64
    assert isinstance(state["window"], toys.Window)
    assert inner.by_id == {id(other.up.weight): 2, id(other.down.weight): 2}  # type: ignore[attr-defined]
    assert inner.recent.maxlen == 3  # type: ignore[attr-defined]
    [view] = inner.views[other.up.weight]  # type: ignore[attr-defined]
    assert view.data_ptr() == other.up.weight.data_ptr() + 4
    assert inner.by_address[view.data_ptr(), 1] is other.up.weight  # type: ignore[attr-defined]


def test_a_look_in_eval_mode_leaves_no_trace() -> None:
    net, twin = Net(), Net()
    optimizer, other = (combined(n, hidden=own(toys.Averaging)) for n in (net, twin))
    for step in range(4):
        train(net, optimizer, range(step, step + 1))
        train(twin, other, range(step, step + 1))
        before = copy.deepcopy(net)
        with optimizer.evaluating(), optimizer.evaluating():
            assert optimizer.foreign[0].optimizer.param_groups[0]["training"] is False
            apart = float((net.up.weight - before.up.weight).detach().abs().max())
            assert (apart > 0) == (step > 0)
            saved = optimizer.export_state()  # of training, also now
        same(net, before)
        assert same_bits(saved["[hidden]:weights/up.weight"], before.up.weight.detach())
        assert optimizer.foreign[0].optimizer.param_groups[0]["training"] is True
    same(net, twin)


def mode_of(optimizer: CombinedOptimizer) -> str:
    one = optimizer.foreign[0].optimizer
    assert isinstance(one, toys.AveragingAside)
    return one.mode


def test_modes_are_kept_by_one_that_has_no_state_in_torchs_sense() -> None:
    net = Net()
    optimizer = combined(net, hidden=own(toys.AveragingAside))
    with optimizer.evaluating():
        assert mode_of(optimizer) == "train", "before a step there is no other"
    train(net, optimizer, range(3))
    before = copy.deepcopy(net)
    for _ in range(2):
        with optimizer.evaluating():
            assert mode_of(optimizer) == "eval"
            assert not torch.equal(net.up.weight, before.up.weight)
        same(net, before)
        state = optimizer.export_state()
        optimizer = combined(net, hidden=own(toys.AveragingAside))
        optimizer.import_state(state)
    assert optimizer.foreign[0].state_bytes() is not None


def test_two_of_one_file_may_fill_what_it_keeps(trusted: None) -> None:
    toys.FILLED.clear()
    net = Net()
    roles = {role: own(toys.FilledByAll, lr=lr) for role, lr in (("hidden", 0.01), ("head", 0.02))}
    train(net, combined(net, **roles), range(3))
    assert len(toys.FILLED) > 1


def test_a_state_of_others_is_refused() -> None:
    net = Net()
    optimizer = combined(net, hidden=own(toys.SignMomentum))
    train(net, optimizer, range(2))
    flat, before = optimizer.export_state(), copy.deepcopy(net)
    with pytest.raises(OptimError, match=r"nothing for mine\.py:SignMomentum \(for hidden\)"):
        optimizer.import_state(combined(Net()).export_state())
    with pytest.raises(OptimError, match="one of another optimizer for hidden, where this one has"):
        combined(Net()).import_state(flat)
    with pytest.raises(OptimError, match=r"lacks up\.weight:mean"):
        optimizer.import_state({k: t for k, t in flat.items() if k != "up.weight:mean"})
    few = CombinedOptimizer(
        [("up.weight", Net().up.weight, "hidden")], {"hidden": own(toys.SignMomentum)}
    )
    with pytest.raises(OptimError, match=r"has a parameter down\.weight that it does not have"):
        few.import_state(flat)
    same(net, before)
    assert all(same_bits(tensor, flat[k]) for k, tensor in optimizer.export_state().items())
    modes = combined(net, hidden=own(toys.Averaging)).export_state()
    modes["[hidden]:weights/up.weight"] = torch.zeros(3)
    with pytest.raises(OptimError, match=r"saved weights of up\.weight have shape \(3,\)"):
        combined(Net(), hidden=own(toys.Averaging)).import_state(modes)
    with pytest.raises(OptimError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)


def test_an_argument_that_was_changed_acts_on_a_loaded_state_or_is_refused() -> None:
    flat = []
    for beta in (0.9, 0.5):
        net = Net()
        optimizer = combined(net, hidden=own(toys.SignMomentum, beta=0.9))
        train(net, optimizer, range(3))
        saved, weights = optimizer.export_state(), net.state_dict()
        net = Net()
        net.load_state_dict(weights)
        changed = combined(net, hidden=own(toys.SignMomentum, beta=beta))
        changed.import_state(saved)
        assert changed.foreign[0].optimizer.param_groups[0]["beta"] == beta
        train(net, changed, range(3, 6))
        flat.append(changed.export_state()["up.weight:mean"])
    assert not torch.equal(*flat)
    for toy, options, said in (
        (toys.Rounded, [{"digits": 3}, {"digits": 4}], "the argument digits of .* cannot be cha"),
        (toys.Twice, [{"beta": 0.9}, {"beta": 0.5}], r"beta of .* it keeps more than its param gr"),
    ):
        one, other = (combined(Net(), hidden=own(toy, **option)) for option in options)
        with pytest.raises(OptimError, match=said):
            other.import_state(one.export_state())


def test_what_is_made_late_and_could_not_be_brought_back_is_told_when_it_is_saved() -> None:
    net = Net()
    optimizer = combined(net, hidden=own(toys.Lately))
    train(net, optimizer, range(29))
    optimizer.export_state()
    with pytest.raises(OptimError, match="its note is a SimpleNamespace that was made in a step"):
        train(net, optimizer, range(29, 31))  # the first after a checkpoint is looked at


@pytest.mark.parametrize(
    "node",
    [
        {"is": "named", "class": "tests.optim.foreign:torch.serialization.os.system", "of": ["x"]},
        {"is": "named", "class": "tests.optim.foreign:Window", "of": [3]},
        {"is": "named", "class": "os:system", "of": ["x"]},
        {"is": "name", "of": "tests.optim.foreign:torch.serialization.os.system", "at": 99},
        {"is": "object", "class": "tests.optim.foreign:itertools", "of": {}, "at": 99},
        {"is": "enum", "class": "tests.optim.foreign:Window", "of": "x", "at": 99},
    ],
)
def test_a_saved_state_reaches_nothing_but_the_optimizers_own_classes(node: dict[str, Any]) -> None:
    """It is data that somebody may have sent, and not a program."""
    net = Net()
    flat = combined(net, hidden=own(toys.SignMomentum)).export_state()
    tree = json.loads(bytes(flat["[hidden]:tree"].numpy()))
    tree["root"]["defaults"]["of"].append(["more", node])
    flat["[hidden]:tree"] = torch.frombuffer(
        bytearray(json.dumps(tree).encode()), dtype=torch.uint8
    )
    with pytest.raises(OptimError, match=r"cannot be saved exactly: its .*(of|is) "):
        combined(net, hidden=own(toys.SignMomentum)).import_state(flat)


def test_random_numbers_of_its_own_are_nobody_elses() -> None:
    """Neither those that drew the weights, nor those of another one in the same run."""

    def drawn(**roles: Any) -> list[torch.Tensor]:
        found = combined(Net(), **roles).foreign
        streams = []
        for one in found:
            assert one._streams is not None
            with one._streams.used():
                streams.append(torch.rand(8))
        return streams

    one, other = drawn(hidden=own(toys.Drawing, random=True),
                       head=own(toys.Drawing, random=True, lr=0.5))  # fmt: skip
    assert not torch.equal(one, other)
    for seed in (0, 1):
        first = torch.rand(8, generator=torch.Generator().manual_seed(seed))
        assert not torch.equal(one, first)


def test_gradients_that_are_not_finite_reach_neither_ours_nor_theirs() -> None:
    net = Net()
    optimizer = combined(net, hidden=own(toys.SignMomentum))
    net.loss(tokens_at(0)).backward()  # type: ignore[no-untyped-call]
    assert net.up.weight.grad is not None
    net.up.weight.grad[0, 0] = float("nan")
    before = copy.deepcopy(net)
    with pytest.raises(OptimError, match=r"up\.weight holds a NaN"):
        optimizer.step()
    same(net, before)


def test_a_number_that_differs_between_ranks_is_in_the_digest() -> None:
    digests = []
    for value in (0.0, 0.0, 1e-30):
        net = Net()
        optimizer = combined(net, hidden=own(toys.SignMomentum))
        with torch.no_grad():
            net.up.weight[3, 3] = value
        digests.append(optimizer.foreign[0].digest())
    assert digests[0] == digests[1] != digests[2]
    assert all(0 <= digest < 2**48 for digest in digests)


def test_so_is_a_state_that_every_rank_has_a_share_of() -> None:
    digests = []
    for missing in ("", "", "mean"):
        net = Net()
        optimizer = combined(net, hidden=own(toys.SignMomentum))
        train(net, optimizer, range(1))
        optimizer.foreign[0].optimizer.state[net.up.weight].pop(missing, None)
        digests.append(optimizer.foreign[0].digest())
    assert digests[0] == digests[1] != digests[2]
