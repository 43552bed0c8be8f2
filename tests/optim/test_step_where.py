"""Steps that the device leaves out by itself, to the last digit and without being asked about."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from speedrun.optim import Adam, AdamOptions, CombinedOptimizer, Muon, MuonOptions
from speedrun.optim.base import SlotOptimizer

Make = Callable[[list[Parameter]], SlotOptimizer]
YES, NO = torch.tensor(True), torch.tensor(False)


def muon(**options: Any) -> Make:
    return lambda params: Muon(params, lr=0.1, **options)


def adam(params: list[Parameter]) -> SlotOptimizer:
    return Adam(params, lr=0.1, weight_decay=0.1)


def both(params: list[Parameter]) -> SlotOptimizer:
    named = [(f"w{i}", param, "hidden" if i else "head") for i, param in enumerate(params)]
    rules = {"hidden": MuonOptions(lr=0.1, weight_decay=0.1), "head": AdamOptions(lr=0.1)}
    return CombinedOptimizer(named, rules)


OPTIMIZERS = {
    "adam": (adam, torch.float32),
    "adam in bf16": (adam, torch.bfloat16),
    "muon": (muon(), torch.float32),
    "muon with decay": (muon(weight_decay=0.1), torch.float32),
    "muon with cautious decay": (muon(weight_decay=0.1, cautious=True), torch.float32),
    "normuon": (muon(neuron_beta=0.9), torch.float32),
    "muon in bf16": (muon(dtype=torch.bfloat16), torch.float32),
    "both": (both, torch.float32),
}


def params_of(dtype: torch.dtype) -> list[Parameter]:
    g = torch.Generator().manual_seed(0)
    shapes = [(16, 16), (16, 16), (8, 24), (24, 8)]
    return [Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in shapes]


def give_gradients(params: list[Parameter], seed: int, factor: float = 1.0) -> None:
    g = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = (factor * torch.randn(param.shape, generator=g)).to(param.dtype)


def everything(params: list[Parameter], optimizer: SlotOptimizer) -> list[Tensor]:
    tensors = [*params, *optimizer.export_state().values()]
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("factor", [math.nan, math.inf, 1.0])
def test_a_step_that_is_left_out_leaves_no_trace(name: str, factor: float) -> None:
    """The first one, too, and others go on as if it had never been begun."""
    make, dtype = OPTIMIZERS[name]
    left, plain = params_of(dtype), params_of(dtype)
    optimizer, other = make(left), make(plain)
    for seed in range(3):
        before = everything(left, optimizer)
        give_gradients(left, 10 + seed, factor)
        optimizer.step_where(NO)
        for found, expected in zip(everything(left, optimizer), before, strict=True):
            assert torch.equal(found, expected)
        for params in (left, plain):
            give_gradients(params, seed)
        optimizer.step_where(YES)
        other.step()
        for found, expected in zip(
            everything(left, optimizer), everything(plain, other), strict=True
        ):
            assert torch.equal(found, expected)
    assert not any(torch.equal(a, b) for a, b in zip(left, params_of(dtype), strict=True))
