"""State in one process: there from the start, saved and loaded exactly, or refused."""

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from speedrun.optim import Adam, Muon, OptimError
from speedrun.optim.layout import Block
from tests.optim.test_muon import MIXED, make_params, momentum_of, train


def test_state_exists_from_the_start_and_is_one_float_per_weight() -> None:
    params = make_params(MIXED)
    optimizer = Muon(params)
    assert optimizer.state_bytes() == 4 * sum(p.numel() for p in params)
    held = [block.state["momentum"] for block in optimizer.blocks]
    assert sum(momentum.numel() for momentum in held) == sum(p.numel() for p in params)
    assert all(momentum.dtype == torch.float32 for momentum in held)


def test_bf16_parameters_keep_fp32_momenta_through_a_checkpoint() -> None:
    params = [Parameter(p.detach().bfloat16()) for p in make_params([(8, 8), (12, 8)])]
    optimizer = Muon(params)
    train(optimizer, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    again = Muon(params)
    again.load_state_dict(saved)
    for p in params:
        assert momentum_of(again, p).dtype == torch.float32
        assert torch.equal(momentum_of(again, p), momentum_of(optimizer, p))


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
    assert torch.equal(momentum_of(swapped, a), momentum_of(optimizer, a))


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    params = make_params([(8, 8), (6, 12)])
    good = Muon([("a", params[0]), ("b", params[1])], lr=0.1)
    train(good, params, range(1))
    kept = momentum_of(good, params[0]).clone()

    def refuse(other: Muon, message: str) -> None:
        with pytest.raises(OptimError, match=message):
            good.load_state_dict(other.state_dict())
        assert torch.equal(momentum_of(good, params[0]), kept)
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


class RowMuon(Muon):
    """Muon with state of other shapes: a number for each row, and one for each matrix."""

    def slots(self, block: Block, options: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().slots(block, options), "row": (block.shape[0], 1), "count": ()}


@pytest.mark.parametrize(
    ("shape", "options", "row", "count"),
    [
        ((6, 10), {}, (6, 1), ()),
        ((10, 6), {}, (10, 1), ()),
        ((12, 10), {"split_rows": 3}, (3, 4, 1), (3,)),
        ((10, 12), {"split_cols": 3}, (3, 10, 1), (3,)),
        ((2, 12, 6), {"batch_dims": 1, "split_rows": 2}, (4, 6, 1), (4,)),
        ((12, 10), {"split_rows": (8, 2, 2)}, (12,), (3,)),
        ((12, 6, 1), {"row_dims": 1, "split_rows": (8, 4), "split_cols": (4, 2)}, (24,), (4,)),
    ],
)
def test_slots_of_any_shape_are_saved_and_loaded(
    shape: tuple[int, ...], options: dict[str, Any], row: tuple[int, ...], count: tuple[int, ...]
) -> None:
    params = make_params([shape, shape])
    first, second = (RowMuon(zip("ab", params, strict=True), **options) for _ in range(2))
    assert first.expected_state()["a"] == {"momentum": shape, "row": row, "count": count}
    for i, block in enumerate(first.blocks):
        for j, tensor in enumerate(block.state.values()):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1000 * i + 100 * j)
    saved = first.export_state()
    assert {key: tuple(tensor.shape) for key, tensor in saved.items()} == {
        f"{name}:{slot}": shape
        for name, slots in first.expected_state().items()
        for slot, shape in slots.items()
    }
    second.import_state(saved)
    for ours, theirs in zip(first.blocks, second.blocks, strict=True):
        assert all(torch.equal(theirs.state[slot], tensor) for slot, tensor in ours.state.items())
    assert first.state_bytes() == sum(
        4 * tensor.numel() for key, tensor in saved.items() if not key.endswith("count")
    )


def test_a_momentum_lies_as_its_parameter_does() -> None:
    """Whatever the grid, what is saved is in the parameter's own order."""
    for options in ({"split_rows": 2}, {"split_cols": 5}, {"split_rows": (8, 2, 2)}, {}):
        [param] = make_params([(12, 10)])
        optimizer = Muon([param], momentum=0.0, **options)
        train(optimizer, [param], range(1))
        assert param.grad is not None
        assert torch.equal(momentum_of(optimizer, param), param.grad)


def test_the_state_of_a_transposed_parameter_has_its_memory_format() -> None:
    """The fused kernel runs over both in the order of memory."""
    start, grad = torch.randn(5, 7), torch.randn(5, 7)
    plain, turned = Parameter(start.clone()), Parameter(start.mT.contiguous().mT)
    for param in (plain, turned):
        param.grad = torch.empty_like(param).copy_(grad)
        Adam([param], lr=0.1).step()
    assert turned.stride() == (1, 5)
    assert torch.equal(plain, turned)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_a_pickled_optimizer_goes_on_as_the_original(shape: tuple[int, ...]) -> None:
    params = make_params([shape, shape])
    optimizer = Muon(params)
    optimizer.step()
    theirs, again = pickle.loads(pickle.dumps((params, optimizer)))
    for one, other in zip(params, theirs, strict=True):
        other.grad = one.grad
    for each in (optimizer, again):
        each.step()
        each.step()
    for one, other in zip(params, theirs, strict=True):
        assert torch.equal(one, other)
    ours, copied = optimizer.export_state(), again.export_state()
    assert all(torch.equal(ours[key], copied[key]) for key in ours)
