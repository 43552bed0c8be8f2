"""The planner: its window, its documents, and the plans of layers."""

import pytest
import torch
from torch import Tensor

from speedrun.config.resolve import resolve
from speedrun.model.mask import WindowUnit, dense_mask
from speedrun.model.plan import AttentionPlan, AttentionPlanner, plan_layer

from .test_gpt import T, ids_of, lively
from .test_mask import scalar

CPU = torch.device("cpu")
DOCUMENTS_BT = torch.arange(3, dtype=torch.int32).repeat_interleave(200)[None, :512]


def planner(unit: WindowUnit, *, documents: bool = True) -> AttentionPlanner:
    words = [f"attention.documents={str(documents).lower()}", f"attention.window={unit}"]
    if unit != "none":
        words += ["attention.window_start=128", "attention.window_end=512"]
    config = resolve("modern", "nano", [*words, "machine.attention=dense"]).config
    return AttentionPlanner(config, CPU)


def mask_of(plan: AttentionPlan) -> Tensor:
    mask = plan.for_layer(0).mask
    assert isinstance(mask, Tensor)
    return mask


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize(
    ("unit", "window"), [("none", None), ("tokens", 70), ("tokens_in_blocks", 70), ("blocks", 2)]
)
def test_plans_follow_the_config(unit: WindowUnit, window: int | None, documents: bool) -> None:
    made = planner(unit, documents=documents)
    made.set_window(window)
    numbers = DOCUMENTS_BT * int(documents)
    expected = dense_mask(numbers, None if window is None else scalar(window), unit)
    assert torch.equal(mask_of(made.plan(DOCUMENTS_BT))[:, 0], expected)
    last = made.plan_last(DOCUMENTS_BT, 100)
    assert torch.equal(mask_of(last)[:, 0], expected[:, -100:])
    starts = [t for t in (0, 200, 400) if t == 0 or documents]
    assert made.plan(DOCUMENTS_BT).starts[0].nonzero().flatten().tolist() == starts
    assert torch.equal(last.starts, made.plan(DOCUMENTS_BT).starts[:, -100:])
    one = dense_mask(0 * DOCUMENTS_BT, None if window is None else scalar(window), unit)[0]
    one_document = torch.zeros(1, len(one), dtype=torch.int32)
    assert made.first_keys(one_document)[0].tolist() == one.int().argmax(dim=1).tolist()


@pytest.mark.parametrize(("unit", "widened"), [("tokens", 300), ("blocks", 3)])
def test_the_window_is_one_tensor_changed_in_place(unit: WindowUnit, widened: int) -> None:
    made = planner(unit)
    window = made.window
    assert window is not None
    made.set_window(1)
    made.widen(300)
    assert (window.item(), window.dtype) == (widened, torch.int32)
    made.widen(10)
    assert window.item() == widened
    made.set_window(2)
    assert window.item() == 2
    assert made.window is window


def test_a_window_is_set_before_it_is_used() -> None:
    planner("none").plan(DOCUMENTS_BT)
    with pytest.raises(AssertionError, match="set_window comes before"):
        planner("blocks").plan(DOCUMENTS_BT)
    with pytest.raises(AssertionError, match="set_window comes before"):
        planner("blocks").plan_last(DOCUMENTS_BT, 1)


@pytest.mark.parametrize(("unit", "window"), [("none", 3), ("blocks", None)])
def test_a_window_is_given_if_the_config_has_one(unit: WindowUnit, window: int | None) -> None:
    with pytest.raises(AssertionError, match="if the config has one"):
        planner(unit).set_window(window)


def test_without_window_widening_changes_nothing() -> None:
    made = planner("none")
    made.widen(300)
    made.set_window(None)
    assert made.window is None


def test_layers_take_the_plans_in_turn() -> None:
    """With a long and a short window in turn, what a layer may not see does not reach it."""
    documents_BT = torch.zeros(1, T, dtype=torch.int32)
    short, long = (plan_layer("dense", documents_BT, scalar(w)) for w in (1, 2))
    plan = AttentionPlan((short, long))
    assert [plan.for_layer(layer) for layer in range(4)] == [short, long, short, long]
    ids = ids_of()
    changed = ids.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    for layers, reached in ((1, False), (2, True)):
        model = lively(layers=layers)
        with torch.no_grad():
            same = (model(ids, plan) == model(changed, plan)).all(-1)[0]
        assert same[128:].all() != reached
