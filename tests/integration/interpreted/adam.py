"""Adam's step of a bf16 table: the kernel against the formula in torch, steps left out and all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from speedrun.model.kernels import launch
from speedrun.optim import Adam
from speedrun.optim.adam import adam_update

from .twins import UNIT, in_the_interpreter, normal

OPTIONS: Mapping[str, Any] = {"lr": 0.3, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.1}


def state_of(like: Tensor) -> dict[str, Tensor]:
    moments = {name: torch.zeros(like.shape) for name in ("exp_avg", "exp_avg_sq")}
    return {**moments, "step": torch.zeros(())}


@pytest.mark.parametrize("shape", [(1,), (7, 3), (1024,), (33, 97), (2, 1024)])
@pytest.mark.parametrize("guarded", [False, True])
def test_against_torch(shape: tuple[int, ...], guarded: bool) -> None:
    """Moments to fp32's last places, weights to bf16's; a step that is left out leaves all bits."""
    start = normal(*shape, dtype=torch.bfloat16)
    ours, theirs = Parameter(start.clone()), Parameter(start.clone())
    mine, other = state_of(ours), state_of(theirs)
    for step in range(5):
        good = torch.tensor(step not in (0, 3)) if guarded else None
        grad = normal(*shape, seed=step, dtype=torch.bfloat16)
        if good is not None and not good:
            grad.fill_(torch.nan)
        theirs.data.copy_(ours.data)  # the interpreter rounds weights in another way
        ours.grad, theirs.grad = grad, grad.clone()
        before = ours.detach().clone()
        with torch.no_grad():
            with in_the_interpreter():
                adam_update(ours, mine, OPTIONS, good)
            adam_update(theirs, other, OPTIONS, good)
        if good is not None and not good:
            assert torch.equal(ours, before)
        off = (ours.float() - theirs.float()).abs()
        assert (off <= UNIT[torch.bfloat16] * theirs.float().abs() + 1e-6).all()
        for name, moment in mine.items():
            torch.testing.assert_close(moment, other[name], rtol=1e-6, atol=1e-7)
    assert mine["step"] == (3 if guarded else 5)


def test_it_is_what_the_optimizer_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bf16 tables that are contiguous; torch has kernels for fp32, and its code for the rest."""
    launched: list[tuple[int, ...]] = []
    start = launch.start

    def noted(kernel: Any, grid: tuple[int, ...], *arguments: Any, **settings: Any) -> None:
        launched.append(tuple(arguments[0].shape))
        start(kernel, grid, *arguments, **settings)

    monkeypatch.setattr(launch, "start", noted)
    params = [
        Parameter(normal(5, 4, dtype=torch.bfloat16)),
        Parameter(normal(5, 6)),
        Parameter(normal(8, 5, dtype=torch.bfloat16).mT),
    ]
    before = [param.detach().clone() for param in params]
    adam = Adam(params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    with in_the_interpreter():
        adam.step()
    assert launched == [(5, 4)]
    assert all(not torch.equal(a, b) for a, b in zip(params, before, strict=True))
