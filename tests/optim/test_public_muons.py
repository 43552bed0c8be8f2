"""torch.optim.Muon and ours train the same toy to the same weights: docs/muon.md, Other Muons.

KellerJordan's, which is a package, is compared by tests/integration/test_public_muons.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.functional import mse_loss

from speedrun.optim import Muon
from tests.optim.reference import run_bf16

Make = Callable[[list[Parameter]], torch.optim.Optimizer]


def make_toy() -> nn.Sequential:
    """A tall matrix, a square and a wide one."""
    torch.manual_seed(0)
    sizes = ((12, 24), (24, 24), (24, 6))
    first, *others = (nn.Linear(fan_in, fan_out, bias=False) for fan_in, fan_out in sizes)
    return nn.Sequential(first, *(layer for other in others for layer in (nn.Tanh(), other)))


def trained(make: Make, steps: int = 40) -> Tensor:
    """The weights of the toy after so many steps on one batch."""
    toy = make_toy()
    optimizer = make(list(toy.parameters()))
    g = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(64, 12, generator=g), torch.randn(64, 6, generator=g)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = mse_loss(toy(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return weights_of(toy)


def weights_of(toy: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in toy.parameters()])


@pytest.fixture
def fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others cast to bf16 by this method, which becomes a copy; ours does not use it."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())


@pytest.mark.usefixtures("fp32")
@pytest.mark.parametrize(
    ("both", "ours", "theirs"),
    [
        # scale, weight decay, Nesterov, momentum
        ({}, {"lr": 0.001, "weight_decay": 0.1}, {}),
        ({"lr": 0.02, "weight_decay": 0.0}, {}, {"adjust_lr_fn": "original"}),
        (
            {"lr": 0.02, "weight_decay": 0.1, "nesterov": False, "momentum": 0.8},
            {"scale": "rms"},
            {"adjust_lr_fn": "match_rms_adamw"},
        ),
        ({"lr": 0.02, "weight_decay": 0.3, "momentum": 0.0}, {"scale": "spectral"}, {}),
        # what is iterated, and what is added to the norm
        (
            {"lr": 0.02, "weight_decay": 0.0, "eps": 1e-10},
            {"coefficients": [(2.0, -1.5, 0.5)] * 7, "iterations": 7},
            {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 7},
        ),
        (
            {"lr": 0.02, "weight_decay": 0.0, "nesterov": False},
            {"iterations": 3},
            {"ns_steps": 3},
        ),
    ],
)
def test_the_same_weights_as_torch_in_fp32(
    both: dict[str, Any], ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    found = trained(lambda params: Muon(params, **both, **ours))
    expected = trained(lambda params: torch.optim.Muon(params, **both, **theirs))
    moved = (expected - weights_of(make_toy())).abs().max()
    assert moved > 0.02
    assert (found - expected).abs().max() < 1e-4 * moved


BF16 = """
import torch
from speedrun.optim import Muon
from tests.optim.test_public_muons import make_toy, trained, weights_of
start = weights_of(make_toy())
a = trained(lambda params: Muon(params, lr=0.02, dtype=torch.bfloat16), 10)
b = trained(lambda params: torch.optim.Muon(params, lr=0.02, weight_decay=0.0), 10)
c = trained(lambda params: Muon(params, lr=0.02), 10)
moved = (b - start).norm()
assert (a - b).norm() < 0.03 * moved, ((a - b).norm(), moved)
assert (a - c).norm() > 1e-4 * moved, "bf16 must show"
print("done")
"""


def test_nearly_the_same_weights_as_torch_in_bf16() -> None:
    run_bf16(BF16)
