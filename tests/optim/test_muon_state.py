"""Muon's state in one process: there from the start, saved and loaded exactly, or refused."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from speedrun.optim import Muon, OptimError
from tests.optim.test_muon import MIXED, make_params, train


def test_state_exists_from_the_start_and_is_one_float_per_weight() -> None:
    params = make_params(MIXED)
    optimizer = Muon(params)
    size = sum(s["momentum"].numel() * 4 for s in optimizer.state.values())
    assert size == 4 * sum(p.numel() for p in params)
    assert all(s["momentum"].dtype == torch.float32 for s in optimizer.state.values())


def test_bf16_parameters_keep_fp32_momenta_through_a_checkpoint() -> None:
    params = [Parameter(p.detach().bfloat16()) for p in make_params([(8, 8), (12, 8)])]
    optimizer = Muon(params)
    train(optimizer, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    again = Muon(params)
    again.load_state_dict(saved)
    for p in params:
        assert again.state[p]["momentum"].dtype == torch.float32
        assert torch.equal(again.state[p]["momentum"], optimizer.state[p]["momentum"])


def resumed(make: Callable[[list[Parameter]], Muon], load: Callable[[Any], Any]) -> None:
    """Six steps, against three steps, a file, and three more in a new optimizer: bit for bit."""
    straight, parted = make_params(MIXED), make_params(MIXED)
    train(make(straight), straight, range(6))
    first = make(parted)
    train(first, parted, range(3))
    saved = load(first.state_dict())
    second = make(parted)
    second.load_state_dict(state_dict=saved)
    train(second, parted, range(3, 6))
    for a, b in zip(straight, parted, strict=True):
        assert torch.equal(a, b)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_resume_is_exact() -> None:
    resumed(lambda p: Muon(p, lr=0.03), through_a_file)
    resumed(lambda p: Muon([(f"w{i}", x) for i, x in enumerate(p)], lr=0.03), through_a_file)
    resumed(lambda p: Muon(p, coefficients="polar_express", dtype=torch.float64), through_a_file)


def test_a_copy_goes_on_alone() -> None:
    params = make_params([(8, 8), (6, 12)])
    optimizer = Muon(params, lr=0.1)
    train(optimizer, params, range(2))
    holder = copy.deepcopy({"params": params, "optimizer": optimizer})
    train(optimizer, params, range(2, 4))
    train(holder["optimizer"], holder["params"], range(2, 4))  # type: ignore[arg-type]
    for a, b in zip(params, holder["params"], strict=True):  # type: ignore[call-overload]
        assert torch.equal(a, b)


def test_loading_matches_by_name_not_by_order() -> None:
    a, b = make_params([(8, 8), (8, 8)])
    optimizer = Muon([("a", a), ("b", b)])
    train(optimizer, [a, b], range(1))
    swapped = Muon([("b", b), ("a", a)])
    swapped.load_state_dict(optimizer.state_dict())
    assert torch.equal(swapped.state[a]["momentum"], optimizer.state[a]["momentum"])


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    params = make_params([(8, 8), (6, 12)])
    good = Muon([("a", params[0]), ("b", params[1])], lr=0.1)
    train(good, params, range(1))
    kept = good.state[params[0]]["momentum"].clone()

    def refuse(other: Muon, message: str) -> None:
        with pytest.raises(OptimError, match=message):
            good.load_state_dict(other.state_dict())
        assert torch.equal(good.state[params[0]]["momentum"], kept)
        assert good.param_groups[0]["lr"] == 0.1

    x, y = make_params([(8, 8), (12, 6)])
    refuse(
        Muon([("a", x), ("b", y)]), r"momentum of parameter b has shape \(12, 6\).*needs \(6, 12\)"
    )
    refuse(Muon([("a", x), ("c", y)]), "nothing for parameter b")
    refuse(Muon([("a", x)]), r"groups of \[1\] parameters")
    z = make_params([(8, 8), (6, 12)])
    refuse(Muon([("a", z[0]), ("b", z[1])], split_rows=2), "split_rows=2")
    with pytest.raises(OptimError, match="parameter a holds nothing"):
        good.load_state_dict({"state": {}, "param_groups": good.state_dict()["param_groups"]})
