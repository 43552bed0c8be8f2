"""One optimizer by roles: routing, refusals, and a life as a torch.optim.Optimizer."""

import copy
import io
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from speedrun.optim import (
    Adam,
    AdamRule,
    CombinedOptimizer,
    Muon,
    MuonRule,
    NonFiniteGradientError,
    OptimError,
    adam_everywhere,
    read_rule,
)
from speedrun.optim.schedules import trapezoid

RULES = {
    "hidden": MuonRule(lr=0.05),
    "embedding": AdamRule(lr=0.6, betas=(0.8, 0.95)),
    "head": AdamRule(lr=0.008, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.01),
    "scalar": AdamRule(lr=0.04),
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
    train(net, CombinedOptimizer(net.by_role(), RULES), range(5))
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


def test_bf16_tables_have_fp32_state_and_follow_the_fp32_path() -> None:
    start = torch.randn(50, 8).bfloat16()
    table, twin = nn.Parameter(start.clone()), nn.Parameter(start.float())
    adam, other = Adam([table], lr=0.1, weight_decay=0.1), Adam([twin], lr=0.1, weight_decay=0.1)
    for step in range(4):
        grad = torch.randn(50, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
        table.grad, twin.grad = grad, grad.float()
        adam.step()
        other.step()
    for slot in ("exp_avg", "exp_avg_sq"):
        assert adam.state[table][slot].dtype == torch.float32
        torch.testing.assert_close(adam.state[table][slot], other.state[twin][slot])
    torch.testing.assert_close(table.float(), twin, atol=0.03, rtol=0.02)


def test_plan_says_who_does_what() -> None:
    optimizer = CombinedOptimizer(Net().by_role(), RULES)
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
    assert sum(row.state_bytes for row in plan.values()) == optimizer.state_bytes()
    lines = optimizer.plan_table().splitlines()
    assert lines[0].split()[:4] == ["parameter", "role", "optimizer", "lr"]
    [up] = [line for line in lines if line.startswith("up.weight")]
    assert up.split() == ["up.weight", "hidden", "muon", "0.05", "192", "768"]
    [total] = [line for line in lines if line.startswith("total") and "hidden" in line]
    assert total.split()[-2:] == ["384", "1,536"]


def test_hidden_state_is_half_of_adamws() -> None:
    net = Net()
    hidden = [entry for entry in net.by_role() if entry[2] == "hidden"]
    muon = CombinedOptimizer(hidden, RULES)
    adam = CombinedOptimizer(hidden, adam_everywhere(RULES, AdamRule(lr=1e-3)))
    assert muon.state_bytes() * 2 == adam.state_bytes() == 8 * 384


def test_adamw_everywhere_is_one_switch() -> None:
    net, twin = Net(), Net()
    rules = adam_everywhere(RULES, AdamRule(lr=3e-3, weight_decay=0.1))
    train(net, CombinedOptimizer(net.by_role(), rules), range(5))
    adam = torch.optim.AdamW(twin.parameters(), 3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    train(twin, adam, range(5))
    same(net, twin, atol=1e-6, rtol=1e-5)


def test_record_3_form() -> None:
    """AdamW on the tied table at a tenth of Muon's rate, one schedule for both."""
    net = Net()
    net.head.weight = net.table.weight
    rules = {"hidden": MuonRule(lr=0.018, scale="none"), "embedding": AdamRule(lr=0.0018)}
    listed = [entry for entry in net.by_role() if entry[2] in rules]
    optimizer = CombinedOptimizer(listed, rules)
    optimizer.set_multiplier(trapezoid(6000, 7000, warmup=250, cooldown=2000))
    rates = {group["role"]: group["lr"] for group in optimizer.param_groups}
    assert rates == {"hidden": pytest.approx(0.009), "embedding": pytest.approx(0.0009)}


def test_unclaimed_and_doubled_parameters_are_refused() -> None:
    net = Net()
    few = {role: rule for role, rule in RULES.items() if role != "scalar"}
    with pytest.raises(OptimError, match=r"gains has role 'scalar', which no rule claims"):
        CombinedOptimizer(net.by_role(), few)
    twice = [*net.by_role(), ("alias", net.head.weight, "head")]
    with pytest.raises(OptimError, match=r"head\.weight and alias are one tensor"):
        CombinedOptimizer(twice, RULES)
    called = [("w", net.up.weight, "hidden"), ("w", net.down.weight, "hidden")]
    with pytest.raises(OptimError, match="two parameters are called w"):
        CombinedOptimizer(called, RULES)
    with pytest.raises(OptimError, match="no parameters"):
        CombinedOptimizer([], RULES)
    with pytest.raises(OptimError, match=r"gains has shape \(8,\).*give it to Adam"):
        CombinedOptimizer([("gains", net.gains, "hidden")], RULES)
    optimizer = CombinedOptimizer(net.by_role(), RULES)
    with pytest.raises(OptimError, match="make a new one"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})


def test_rules_from_plain_data() -> None:
    rule = read_rule("qkv", {"kind": "muon", "lr": 0.02, "split_rows": 3})
    assert rule == MuonRule(lr=0.02, split_rows=3)
    assert read_rule("head", {"kind": "adam", "lr": 1e-3}) == AdamRule(lr=1e-3)
    for options, message in (
        ({"kind": "sgd", "lr": 1.0}, "kind='sgd'"),
        ({"kind": "adam", "lr": 1.0, "momentum": 0.9}, "unknown option 'momentum'"),
        ({"kind": "muon"}, "no 'lr'"),
    ):
        with pytest.raises(OptimError, match=message):
            read_rule("hidden", options)


def test_multiplier_scheduler_and_closure() -> None:
    net = Net()
    optimizer = CombinedOptimizer(net.by_role(), RULES)
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
    train(straight, CombinedOptimizer(straight.by_role(), RULES), range(6))

    parted = Net()
    first = CombinedOptimizer(parted.by_role(), RULES)
    train(parted, first, range(3))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    flat = save(first.export_state())
    middle = copy.deepcopy(parted)

    file.seek(0)
    second = CombinedOptimizer(parted.by_role(), RULES)
    second.load_state_dict(torch.load(file, weights_only=True))
    train(parted, second, range(3, 6))
    same(straight, parted)

    third = CombinedOptimizer(middle.by_role(), RULES)
    third.import_state(load(flat))
    train(middle, third, range(3, 6))
    same(straight, middle)


def test_flat_state_is_keyed_by_name_and_is_a_copy() -> None:
    net = Net()
    optimizer = CombinedOptimizer(net.by_role(), RULES)
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
    optimizer = CombinedOptimizer(net.by_role(), RULES)
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
    twin = CombinedOptimizer(net.by_role(), adam_everywhere(RULES, AdamRule(lr=1e-3)))
    with pytest.raises(OptimError, match="saved under other rules"):
        optimizer.import_state(twin.export_state())


def test_a_non_finite_gradient_anywhere_stops_both_parts() -> None:
    net = Net()
    optimizer = CombinedOptimizer(net.by_role(), RULES)
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
    optimizer = CombinedOptimizer([("table", table.weight, "embedding")], RULES)
    table(tokens_at(0)).sum().backward()
    with pytest.raises(OptimError, match="gradient of table is sparse"):
        optimizer.step()


def test_a_deep_copy_goes_on_alone() -> None:
    net = Net()
    optimizer = CombinedOptimizer(net.by_role(), RULES)
    train(net, optimizer, range(2))
    both: dict[str, Any] = copy.deepcopy({"net": net, "optimizer": optimizer})
    train(net, optimizer, range(2, 4))
    train(both["net"], both["optimizer"], range(2, 4))
    same(net, both["net"])


def test_the_folder_works_without_the_rest_of_the_package(tmp_path: Path) -> None:
    """Copied elsewhere under the same name, with nothing beside it, it imports and steps."""
    source = Path(__file__).parents[2] / "speedrun" / "optim"
    target = tmp_path / "speedrun" / "optim"
    target.mkdir(parents=True)
    for file in source.glob("*.py"):
        (target / file.name).write_text(file.read_text())
    program = (
        "import torch, speedrun.optim as o; p = torch.nn.Parameter(torch.ones(3, 3));"
        "p.grad = torch.eye(3); o.Muon([p]).step();"
        "assert 'site-packages' not in o.__file__; print(o.__file__)"
    )
    child = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.stdout.startswith(str(tmp_path)), child.stderr
