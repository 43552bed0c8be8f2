"""Adam: against torch's, and its two paths against each other."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from speedrun.optim import Adam, OptimError, adam_update


def test_bf16_tables_have_fp32_state_and_follow_the_fp32_path() -> None:
    start = torch.randn(50, 8).bfloat16()
    table, twin = nn.Parameter(start.clone()), nn.Parameter(start.float())
    adam, other = Adam([table], lr=0.1, weight_decay=0.1), Adam([twin], lr=0.1, weight_decay=0.1)
    for step in range(4):
        grad = torch.randn(50, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
        table.grad, twin.grad = grad, grad.float()
        adam.step()
        other.step()
    ours, theirs = adam.whole_state()[table], other.whole_state()[twin]
    for slot in ("exp_avg", "exp_avg_sq"):
        assert adam.blocks[0].state[slot].dtype == ours[slot].dtype == torch.float32
        torch.testing.assert_close(ours[slot], theirs[slot])
    torch.testing.assert_close(table.float(), twin, atol=0.03, rtol=0.02)


def test_both_paths_are_adamw() -> None:
    start = torch.randn(9, 5)
    fused, plain, torchs = (nn.Parameter(start.clone()) for _ in range(3))
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.1}
    ours, other = Adam([fused], **options), torch.optim.AdamW([torchs], **options)
    state = {"exp_avg": torch.zeros(9, 5), "exp_avg_sq": torch.zeros(9, 5), "step": torch.zeros(())}
    for step in range(4):
        grad = torch.randn(9, 5, generator=torch.Generator().manual_seed(step))
        for param in (fused, plain, torchs):
            param.grad = grad
        ours.step()
        other.step()
        with torch.no_grad():
            adam_update(plain, state, options)
    for found in (fused, plain):
        torch.testing.assert_close(found, torchs, atol=1e-6, rtol=1e-6)
    for slot, tensor in ours.whole_state()[fused].items():
        torch.testing.assert_close(tensor, state[slot], atol=1e-7, rtol=1e-6)


def test_a_parameter_without_gradient_is_left_alone() -> None:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3).bfloat16())]
    optimizer = Adam(params, lr=0.1, weight_decay=0.1)
    optimizer.step()
    assert all(torch.equal(param, torch.ones_like(param)) for param in params)
    assert all(not tensor.any() for tensor in optimizer.export_state().values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0, but it must be greater than or equal to 0"),
        ({"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\), but it must be less than 1"),
        ({"eps": -1e-8}, "eps is -1e-08"),
        ({"weight_decay": math.inf}, "weight_decay is inf"),
        ({"momentum": 0.9}, "momentum is not an option of adam; its options are lr, betas, eps"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptimError, match=message):
        Adam([nn.Parameter(torch.ones(2))], **options)
    if "momentum" not in options:
        optimizer = Adam([nn.Parameter(torch.ones(2))])
        with pytest.raises(OptimError, match=message):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], **options})
        assert len(optimizer.param_groups) == len(optimizer.blocks) == 1


def test_integers_are_refused_by_name() -> None:
    ids = torch.ones(3, dtype=torch.int64)
    with pytest.raises(OptimError, match=r"parameter ids is torch.int64, but Adam needs floating"):
        Adam([("ids", ids)])
