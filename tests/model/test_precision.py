"""What computes in bf16 on a GPU, run here in bf16: the model, its gradients, its updates.

oneDNN's bf16 products are illegal instructions on some machines, so torch's own loops do them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.model import attention
from speedrun.model.block import Block
from speedrun.model.embeddings import Table
from speedrun.model.gpt import GPT
from speedrun.model.plan import AttentionPlanner
from speedrun.optim.build import build_optimizer

SIZES = ("model.layers=4", "model.width=64", "model.heads=2", "batch.length=128",
         "batch.tokens=256", "validation.tokens=256", "machine.attention=dense")  # fmt: skip
V = 300
FP32_STREAM = ["baseline", "record-02", "record-03", "record-09"]
BF16_STREAM = ["record-10", "record-14", "record-18", "best"]
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def sure_products() -> Iterator[None]:
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    yield
    torch.backends.mkldnn.enabled = before


def config_of(recipe: str, *overrides: str) -> Config:
    return resolve(recipe, "nano", [*SIZES, *overrides]).config


def model_of(config: Config, dtype: torch.dtype) -> GPT:
    """Nothing starts at zero, so that every product has something to do."""
    torch.manual_seed(0)
    model = GPT(config.model, V, config.batch.length)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and not parameter.any():
                parameter.normal_(std=0.05)
    return model.set_precision(dtype)


def loss_of(config: Config, model: GPT, seed: int = 0) -> Tensor:
    ids = torch.randint(0, V, (2, 128), generator=torch.Generator().manual_seed(seed))
    planner = AttentionPlanner(config, torch.device("cpu"), model.dtype)
    planner.set_window(128 // config.window_unit if config.attention.window != "none" else None)
    documents = (ids < 4).cumsum(1).int()
    loss: Tensor = model(ids, planner.plan(documents), ids.roll(-1, 1))
    return loss


def kept_in(model: GPT) -> dict[str, torch.dtype]:
    tables = {id(module.weight) for module in model.modules() if isinstance(module, Table)}
    return {
        "tables" if id(parameter) in tables else "others": parameter.dtype
        for parameter in model.parameters()
    }


@pytest.mark.parametrize("recipe", [*FP32_STREAM, *BF16_STREAM])
def test_what_is_bf16_and_what_is_not(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(recipe)
    model, seen = model_of(config, BF16), {}
    expected = FP32 if recipe in FP32_STREAM else BF16
    assert kept_in(model) == {"tables": expected, "others": FP32}
    attend = attention.attend

    def watched(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        seen["attention"] = {q.dtype, k.dtype, v.dtype}
        return attend(q, k, v, *rest)

    def stream(_: nn.Module, __: Any, given: tuple[Tensor, Tensor]) -> None:
        seen.setdefault("stream", set()).add(given[0].dtype)

    monkeypatch.setattr(attention, "attend", watched)
    for module in model.modules():
        if isinstance(module, Block):
            module.register_forward_hook(stream)
    loss = loss_of(config, model)
    assert loss.dtype == FP32, "the softmax is in fp32"
    assert seen == {"attention": {BF16}, "stream": {expected}}
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {p.dtype == p.grad.dtype for p in model.parameters() if p.grad is not None}
    assert gradients == {True}


@pytest.mark.parametrize("recipe", [*FP32_STREAM, *BF16_STREAM])
def test_loss_and_gradients_are_those_of_fp32(recipe: str) -> None:
    config = config_of(recipe)
    found = {}
    for dtype in (FP32, BF16):
        model = model_of(config, dtype)
        loss = loss_of(config, model)
        loss.backward()  # type: ignore[no-untyped-call]
        grads = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
        found[dtype] = loss.detach(), torch.cat(grads)
    (exact, exact_grad), (rounded, rounded_grad) = found[FP32], found[BF16]
    assert abs(rounded - exact) < 2e-3 * exact  # a number of bf16 is known to 2^-9
    off = (rounded_grad - exact_grad).norm() / exact_grad.norm()
    assert 1e-4 < off < 0.03, "bf16 must show, and no more"


@pytest.mark.parametrize("recipe", ["baseline", "record-03"])
def test_updates_that_bf16_would_round_away_are_made(recipe: str) -> None:
    """The records before the tenth had fp32 tables under autocast; a bf16 head of 0.02 would not
    notice an update of 6e-5."""
    config = config_of(recipe, "optimizer.head.lr=1e-5", "optimizer.embedding.lr=1e-5")
    model = model_of(config, BF16)
    tables = [module.weight for module in model.modules() if isinstance(module, Table)]
    before = [table.detach().clone() for table in tables]
    optimizer = build_optimizer(model.named_roles(), config)
    for seed in range(3):
        loss_of(config, model, seed).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    for table, old in zip(tables, before, strict=True):
        moved = (table != old).float().mean()
        assert moved > 0.95
        assert 0 < (table - old).abs().mean() < 1e-4


def test_a_machine_of_fp32_has_fp32_throughout() -> None:
    for recipe in (*FP32_STREAM, *BF16_STREAM):
        model = model_of(config_of(recipe), BF16).set_precision(FP32)
        assert set(kept_in(model).values()) == {FP32}
        assert loss_of(config_of(recipe), model).dtype == FP32
