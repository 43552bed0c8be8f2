"""Blocks whose inner numbers are computed again in the backward: the same bits from less memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.errors import ConfigError
from speedrun.model.gpt import GPT
from speedrun.model.plan import AttentionPlanner
from speedrun.train.build import build_model

V = 300
SIZES = ("model.layers=8", "model.width=64", "model.heads=2", "batch.length=256",
         "batch.tokens=256", "validation.tokens=256")  # fmt: skip
RECIPES = ["baseline", "record-04", "record-09", "record-11", "record-14", "record-18", "best"]
CPU = torch.device("cpu")


def config_of(recipe: str, *words: str) -> Config:
    return resolve(recipe, "nano", [*SIZES, *words]).config


def model_of(config: Config) -> GPT:
    """Nothing starts at zero, so that every path has something to carry."""
    model = build_model(config, V, torch.float32, CPU)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return model


def loss_of(model: GPT, config: Config) -> tuple[Tensor, int]:
    """And the bytes that are kept for the backward pass."""
    ids = torch.randint(0, V, (1, 256), generator=torch.Generator().manual_seed(2))
    planner = AttentionPlanner(config, CPU)
    planner.set_window(2 if planner.window is not None else None)
    plan = planner.plan((ids < 4).cumsum(1).int())
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def seen(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(seen, lambda tensor: tensor):
        loss: Tensor = model(ids, plan, ids.roll(-1, 1))
    return loss, sum(kept.values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_bits_from_less_memory(recipe: str) -> None:
    found = {}
    for word in ("false", "true"):
        config = config_of(recipe, f"machine.recompute={word}")
        model = model_of(config)
        loss, kept = loss_of(model, config)
        loss.backward()  # type: ignore[no-untyped-call]
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found[word] = loss.detach(), kept, grads
    (plain, most, expected), (again, least, grads) = found["false"], found["true"]
    assert torch.equal(plain, again)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, expected[name]), name
    assert least < 0.5 * most


def test_nothing_is_kept_where_there_is_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("record-18", "machine.recompute=true")
    model = model_of(config)
    monkeypatch.setattr("speedrun.model.gpt.checkpoint", None)  # and nobody asks for it
    with torch.no_grad():
        loss, kept = loss_of(model.eval(), config)
    assert loss.isfinite()
    assert kept == 0


COUNTING = """
import torch
from speedrun.model.block import MLP

class Counting(MLP):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("fixed", torch.ones(()))

    def forward(self, x, norm):
        if self.training:
            self.seen += 1
        return super().forward(x, norm) * self.fixed
"""


def test_a_buffer_that_would_change_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(COUNTING)
    own = f"custom.mlp.use={tmp_path / 'counting.py'}:Counting"
    model_of(config_of("record-18", own))
    with pytest.raises(
        ConfigError, match=r"Counting\): its forward pass changes blocks\.0\.mlp\.seen"
    ):
        model_of(config_of("record-18", own, "machine.recompute=true"))


NOISY = """
import torch
from speedrun.model.block import MLP

class Noisy(MLP):
    def forward(self, x, norm):
        y = super().forward(x, norm)
        return y + 0.1 * torch.randn_like(y) if self.training else y
"""


def test_random_numbers_of_users_are_the_same_again(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    own = f"custom.mlp.use={tmp_path / 'noisy.py'}:Noisy"
    grads = []
    for word in ("false", "true"):
        config = config_of("record-18", own, f"machine.recompute={word}")
        model = model_of(config)
        torch.manual_seed(3)
        loss_of(model.train(), config)[0].backward()  # type: ignore[no-untyped-call]
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
