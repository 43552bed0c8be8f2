"""The step's model compiles to one graph, and no window of a whole schedule compiles it again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from speedrun.config.resolve import resolve
from speedrun.config.schedule import settings_at
from speedrun.config.schema import Config
from speedrun.model.gpt import GPT
from speedrun.model.plan import AttentionPlanner

SIZES = ("model.layers=4", "model.width=32", "model.heads=2", "batch.length=512",
         "batch.tokens=1024", "validation.tokens=512", "train.steps=40")  # fmt: skip


def step(model: Callable[..., torch.Tensor], planner: AttentionPlanner, seed: int) -> torch.Tensor:
    ids = torch.randint(0, 64, (2, 512), generator=torch.Generator().manual_seed(seed))
    documents = (ids == 0).cumsum(1).int()
    loss = model(ids, planner.plan(documents), ids)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def build(recipe: str) -> tuple[Config, GPT, AttentionPlanner]:
    config = resolve(recipe, "nano", [*SIZES, "machine.attention=blocks"]).config
    torch.manual_seed(0)
    model = GPT(config.model, 64, 512)
    planner = AttentionPlanner(config, torch.device("cpu"))
    planner.set_window(settings_at(config, 0).window)
    return config, model, planner


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["baseline", "record-09", "record-14", "record-18"])
def test_one_graph_for_a_whole_schedule(recipe: str) -> None:
    config, model, planner = build(recipe)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    windows = set()
    for at in range(config.steps + 1):
        window = settings_at(config, at).window
        windows.add(window)
        planner.set_window(window)
        got = step(compiled, planner, seed=at)
        if at % 10 == 0:
            torch.testing.assert_close(got, step(model, planner, seed=at), atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 1
    if recipe == "record-18":
        assert len(windows) == 3


@pytest.mark.slow
def test_blocks_of_one_form_share_a_graph() -> None:
    _, model, planner = build("modern")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True, dynamic=False)
    step(model, planner, seed=0)
    assert counter.frame_count == 1
