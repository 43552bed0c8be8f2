"""One optimizer by roles: routing, refusals, and a life as a torch.optim.Optimizer."""

import copy
import io
import math
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from speedrun.config.schedule import trapezoid
from speedrun.optim import (
    AdamOptions,
    CombinedOptimizer,
    Muon,
    MuonOptions,
    NonFiniteGradientError,
    OptimError,
)
from tests.test_imports import ROOT, import_graph, stage

OPTIONS = {
    "hidden": MuonOptions(lr=0.05),
    "embedding": AdamOptions(lr=0.6, betas=(0.8, 0.95)),
    "head": AdamOptions(lr=0.008, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.01),
    "scalar": AdamOptions(lr=0.04),
}


class Net(nn.Module):
    """A table, two hidden matrices, gains and a head, each with its role."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 8)
        self.up, self.down = nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False)
        self.gains = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 11, bias=False)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens[:-1])
        x = x + self.gains * self.down(self.up(x).relu().square())
        loss: torch.Tensor = nn.functional.cross_entropy(self.head(x), tokens[1:])
        return loss

    def by_role(self) -> list[tuple[str, nn.Parameter, str]]:
        roles = {"table": "embedding", "up": "hidden", "down": "hidden", "gains": "scalar"}
        return [
            (name, p, roles.get(name.split(".")[0], "head")) for name, p in self.named_parameters()
        ]


def tokens_at(step: int) -> torch.Tensor:
    return torch.randint(0, 11, (32,), generator=torch.Generator().manual_seed(step))


def train(net: Net, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        net.loss(tokens_at(step)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def same(a: nn.Module, b: nn.Module, *, atol: float = 0.0, rtol: float = 0.0) -> None:
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y, atol=atol, rtol=rtol)


def test_is_its_parts_side_by_side() -> None:
    net, twin = Net(), Net()
    train(net, CombinedOptimizer(net.by_role(), OPTIONS), range(5))
    muon = Muon([twin.up.weight, twin.down.weight], lr=0.05)
    adam = torch.optim.AdamW(
        [
            {"params": [twin.table.weight], "lr": 0.6, "betas": (0.8, 0.95), "weight_decay": 0.0},
            {
                "params": [twin.head.weight],
                "lr": 0.008,
                "betas": (0.8, 0.95),
                "eps": 1e-10,
                "weight_decay": 0.01,
            },
            {"params": [twin.gains], "lr": 0.04, "betas": (0.9, 0.95), "weight_decay": 0.0},
        ],
        foreach=True,
    )
    for step in range(5):
        twin.zero_grad()
        twin.loss(tokens_at(step)).backward()  # type: ignore[no-untyped-call]
        muon.step()
        adam.step()
    same(net, twin, atol=1e-4, rtol=1e-4)


def test_plan_says_who_does_what() -> None:
    optimizer = CombinedOptimizer(Net().by_role(), OPTIONS)
    plan = {row.name: row for row in optimizer.plan()}
    assert plan["up.weight"].optimizer == "muon"
    assert plan["up.weight"].state_bytes == 4 * 24 * 8
    assert plan["table.weight"].state_bytes == 2 * 4 * 11 * 8
    assert (plan["gains"].role, plan["gains"].optimizer, plan["gains"].lr) == (
        "scalar",
        "adam",
        0.04,
    )
    assert sum(row.count for row in plan.values()) == sum(p.numel() for p in Net().parameters())
    assert sum(row.state_bytes or 0 for row in plan.values()) == optimizer.state_bytes()
    lines = optimizer.plan_table().splitlines()
    assert lines[0].split()[:4] == ["parameter", "role", "optimizer", "lr"]
    [up] = [line for line in lines if line.startswith("up.weight")]
    assert up.split() == ["up.weight", "hidden", "muon", "0.05", "192", "768"]
    [total] = [line for line in lines if line.startswith("total") and "hidden" in line]
    assert total.split()[-2:] == ["384", "1,536"]


def test_hidden_state_is_half_of_adamws() -> None:
    net = Net()
    hidden = [entry for entry in net.by_role() if entry[2] == "hidden"]
    muon = CombinedOptimizer(hidden, OPTIONS)
    adam = CombinedOptimizer(hidden, dict.fromkeys(OPTIONS, AdamOptions(lr=1e-3)))
    assert muon.state_bytes() * 2 == adam.state_bytes() == 8 * 384


def test_adamw_everywhere_is_one_switch() -> None:
    net, twin = Net(), Net()
    options = dict.fromkeys(OPTIONS, AdamOptions(lr=3e-3, weight_decay=0.1))
    train(net, CombinedOptimizer(net.by_role(), options), range(5))
    adam = torch.optim.AdamW(twin.parameters(), 3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    train(twin, adam, range(5))
    same(net, twin, atol=1e-6, rtol=1e-5)


def test_record_3_form() -> None:
    """AdamW on the tied table at a tenth of Muon's rate, one schedule for both."""
    net = Net()
    net.head.weight = net.table.weight
    options = {"hidden": MuonOptions(lr=0.018, scale="none"), "embedding": AdamOptions(lr=0.0018)}
    listed = [entry for entry in net.by_role() if entry[2] in options]
    optimizer = CombinedOptimizer(listed, options)
    optimizer.set_multiplier(trapezoid(6000, 7000, warmup=250, cooldown=2000))
    rates = {group["role"]: group["lr"] for group in optimizer.param_groups}
    assert rates == {"hidden": pytest.approx(0.009), "embedding": pytest.approx(0.0009)}


def test_unclaimed_and_doubled_parameters_are_refused() -> None:
    net = Net()
    few = {role: chosen for role, chosen in OPTIONS.items() if role != "scalar"}
    with pytest.raises(OptimError, match=r"gains has role 'scalar', which has no options"):
        CombinedOptimizer(net.by_role(), few)
    twice = [*net.by_role(), ("alias", net.head.weight, "head")]
    with pytest.raises(OptimError, match=r"head\.weight and alias are one tensor"):
        CombinedOptimizer(twice, OPTIONS)
    called = [("w", net.up.weight, "hidden"), ("w", net.down.weight, "hidden")]
    with pytest.raises(OptimError, match="two parameters are called w"):
        CombinedOptimizer(called, OPTIONS)
    with pytest.raises(OptimError, match="no parameters"):
        CombinedOptimizer([], OPTIONS)
    with pytest.raises(OptimError, match=r"gains has shape \(8,\).*give it to Adam"):
        CombinedOptimizer([("gains", net.gains, "hidden")], OPTIONS)
    optimizer = CombinedOptimizer(net.by_role(), OPTIONS)
    with pytest.raises(OptimError, match="make a new one"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})


def test_options_from_plain_data() -> None:
    net = Net()
    fused = nn.Parameter(torch.ones(24, 8))
    given = {
        "qkv": {"kind": "muon", "lr": 0.02, "split_rows": [8, 8, 8], "momentum": 0.9},
        "head": {"kind": "adam", "lr": 1},
    }
    optimizer = CombinedOptimizer([("w", fused, "qkv"), ("h", net.head.weight, "head")], given)
    muon, adam = optimizer.param_groups
    assert (muon["lr"], muon["momentum"], muon["split_rows"]) == (0.02, 0.9, (8, 8, 8))
    assert (adam["lr"], adam["betas"]) == (1.0, AdamOptions().betas)
    for options, message in (
        ({"kind": "sgd", "lr": 1.0}, "role 'hidden' have kind='sgd'; use 'muon', 'adam' or 'own'"),
        ({"kind": "adam", "lr": 1.0, "momentum": 0.9}, "momentum is not an option of adam; its"),
        ({"kind": "adam", "lr": -1.0}, "role 'hidden': lr is -1.0, but it must be"),
        ({"kind": "muon"}, "no 'lr'"),
        (MuonOptions(lr=0.1, split_qkv=True), "role 'hidden' set split_qkv, which only a recipe"),
        (MuonOptions(momentum_start=0.85), "momentum_start, which only a recipe has"),
    ):
        with pytest.raises(OptimError, match=message):
            CombinedOptimizer(net.by_role(), {**OPTIONS, "hidden": options})


def test_loaded_options_are_checked_and_those_of_the_machine_stay() -> None:
    net = Net()
    optimizer = CombinedOptimizer(net.by_role(), OPTIONS)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["role"] == "hidden"
    saved["param_groups"][0] |= {"dtype": torch.float64, "lr": 0.0, "momentum": 0.5}
    optimizer.load_state_dict(saved)
    first = optimizer.param_groups[0]
    assert (first["dtype"], first["lr"], first["momentum"]) == (None, 0.0, 0.5)
    for changed, message in (
        ({"momentum": 2.0}, "momentum is 2.0"),
        ({"role": "head"}, "role=head, but this optimizer has role=hidden"),
        ({"split_rows": 2}, "split_rows=2"),
    ):
        saved = optimizer.state_dict()
        saved["param_groups"][0] |= {"lr": 0.7, **changed}
        with pytest.raises(OptimError, match=message):
            optimizer.load_state_dict(saved)
        assert first["lr"] == 0.0


def test_multiplier_scheduler_and_closure() -> None:
    net = Net()
    optimizer = CombinedOptimizer(net.by_role(), OPTIONS)
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.set_multiplier(0.25)
    assert {g["role"]: g["lr"] for g in optimizer.param_groups} == {
        "hidden": 0.0125,
        "embedding": 0.15,
        "head": 0.002,
        "scalar": 0.01,
    }
    optimizer.set_multiplier(1.0)
    optimizer.set_momentum(0.85)
    assert [g.get("momentum") for g in optimizer.param_groups] == [0.85, None, None, None]

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = net.loss(tokens_at(0))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    first = optimizer.step(closure)
    schedule.step()
    still = copy.deepcopy(net)
    second = optimizer.step(closure)
    assert second < first
    same(net, still)  # the scheduler's zero reached both parts


def test_resume_is_exact_by_state_dict_and_by_flat_tensors() -> None:
    straight = Net()
    train(straight, CombinedOptimizer(straight.by_role(), OPTIONS), range(6))

    parted = Net()
    first = CombinedOptimizer(parted.by_role(), OPTIONS)
    train(parted, first, range(3))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    flat = save(first.export_state())
    middle = copy.deepcopy(parted)

    file.seek(0)
    second = CombinedOptimizer(parted.by_role(), OPTIONS)
    second.load_state_dict(torch.load(file, weights_only=True))
    train(parted, second, range(3, 6))
    same(straight, parted)

    third = CombinedOptimizer(middle.by_role(), OPTIONS)
    third.import_state(load(flat))
    train(middle, third, range(3, 6))
    same(straight, middle)


def test_flat_state_is_keyed_by_name_and_is_a_copy() -> None:
    net = Net()
    optimizer = CombinedOptimizer(net.by_role(), OPTIONS)
    train(net, optimizer, range(1))
    flat = optimizer.export_state()
    assert set(flat) == {"up.weight:momentum", "down.weight:momentum"} | {
        f"{name}:{slot}"
        for name in ("table.weight", "head.weight", "gains")
        for slot in ("exp_avg", "exp_avg_sq", "step")
    }
    kept = flat["up.weight:momentum"].clone()
    train(net, optimizer, range(1, 2))
    assert torch.equal(flat["up.weight:momentum"], kept)


def test_a_state_that_does_not_fit_is_refused() -> None:
    net = Net()
    optimizer = CombinedOptimizer(net.by_role(), OPTIONS)
    train(net, optimizer, range(1))
    flat = optimizer.export_state()
    for broken, message in (
        ({**flat, "up.weight:momentum": torch.ones(3, 3)}, r"up\.weight has shape \(3, 3\)"),
        ({k: v for k, v in flat.items() if k != "gains:step"}, "gains holds exp_avg, exp_avg_sq,"),
        ({**flat, "other:momentum": torch.ones(1)}, "has a parameter other"),
    ):
        with pytest.raises(OptimError, match=message):
            optimizer.import_state(broken)
    assert all(torch.equal(v, flat[k]) for k, v in optimizer.export_state().items())
    twin = CombinedOptimizer(net.by_role(), dict.fromkeys(OPTIONS, AdamOptions(lr=1e-3)))
    with pytest.raises(OptimError, match="saved under other options"):
        optimizer.import_state(twin.export_state())


def test_a_non_finite_gradient_anywhere_stops_both_parts() -> None:
    net = Net()
    optimizer = CombinedOptimizer(net.by_role(), OPTIONS)
    train(net, optimizer, range(2))
    before, state = copy.deepcopy(net), optimizer.export_state()
    net.loss(tokens_at(2)).backward()  # type: ignore[no-untyped-call]
    assert net.gains.grad is not None
    net.gains.grad[3] = math.nan
    with pytest.raises(NonFiniteGradientError, match="gains holds"):
        optimizer.step()
    same(net, before)
    assert all(torch.equal(v, state[k]) for k, v in optimizer.export_state().items())


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(11, 8, sparse=True)
    optimizer = CombinedOptimizer([("table", table.weight, "embedding")], OPTIONS)
    table(tokens_at(0)).sum().backward()
    with pytest.raises(OptimError, match="gradient of table is sparse"):
        optimizer.step()


def test_a_deep_copy_goes_on_alone() -> None:
    net = Net()
    optimizer = CombinedOptimizer(net.by_role(), OPTIONS)
    train(net, optimizer, range(2))
    both: dict[str, Any] = copy.deepcopy({"net": net, "optimizer": optimizer})
    train(net, optimizer, range(2, 4))
    train(both["net"], both["optimizer"], range(2, 4))
    same(net, both["net"])


def test_the_optimizers_need_only_the_declarations_of_options_and_the_kernels() -> None:
    stages = ("config", "optim")
    graph = import_graph(ROOT)
    needed = {name for module in graph if stage(module) in stages for name in graph[module]}
    others = {name for name in needed if stage(name) not in (*stages, "errors", "files")}
    top = {"speedrun.settings", "speedrun.streams", "speedrun.traces"}
    kernels = {f"speedrun.model.kernels{name}" for name in ("", ".adam", ".symmetric")}
    assert others == {"speedrun.model.native", *kernels, *top}
