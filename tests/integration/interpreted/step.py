"""A step of a small GPT through the kernels, interpreted: loss and all gradients as in torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from speedrun.model import kernels, native
from speedrun.model.kernels import launch
from speedrun.train.build import choose_device
from speedrun.train.trainer import Trainer
from speedrun.train.world import World
from tests.train.heard import Make

SMALL = ("model.layers=4", "model.width=48", "batch.length=512", "batch.tokens=512",
         "validation.tokens=512")  # fmt: skip
pytestmark = pytest.mark.timeout(1800)
LAUNCHED = {
    "cpu": {"softcap_cross_entropy", "product", "symmetric"},
    "rehearsal": {"softcap_cross_entropy", "product", "symmetric", "adam"},
}


@pytest.fixture(autouse=True)
def _torch_code_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is no kernel of Triton's."""
    monkeypatch.setenv(native.SWITCH, "0")
    native.load.cache_clear()


def stepped(
    tiny: Make, device: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Tensor], dict[str, Tensor], set[str], str]:
    """Loss and gradients of the first step, weights after it, what was launched, what is said."""
    names: set[str] = set()
    start = launch.start

    def noted(kernel, *arguments, **settings):  # type: ignore[no-untyped-def]
        names.add(kernel.__name__)
        start(kernel, *arguments, **settings)

    monkeypatch.setattr(launch, "start", noted)
    config = tiny(*SMALL, f"machine.device={device}", f"machine.kernels={chosen}",
                  recipe="record-18")  # fmt: skip
    trainer = Trainer(config, World.alone(choose_device("cpu")), Path(config.data.dir))
    with trainer.loader:
        trainer.apply_settings()
        loss = trainer.forward_backward(next(trainer.loader))
        gradients = {
            name: parameter.grad.double()
            for name, parameter in trainer.model.named_parameters()
            if parameter.grad is not None
        }
        trainer.optimizer.step()
    monkeypatch.setattr(launch, "start", start)
    kernels.use_kernels("torch", choose_device("cpu"))
    weights = {name: x.detach().double() for name, x in trainer.model.named_parameters()}
    return {"loss": loss.double(), **gradients}, weights, names, "\n".join(trainer.notes)


@pytest.mark.parametrize(("device", "units"), [("cpu", 1e-5), ("rehearsal", 0.03)])
def test_a_step(device: str, units: float, tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 as on a CPU, and a GPU's bf16 with the whole model in one graph."""
    found, after, launched, said = stepped(tiny, device, "triton", monkeypatch)
    expected, theirs, none, _ = stepped(tiny, device, "torch", monkeypatch)
    assert launched == LAUNCHED[device]
    assert not none
    assert "triton for loss, MLP, Muon and bf16 tables" in said
    assert found.keys() == expected.keys()
    assert len(found) > 15
    for name, exact in expected.items():
        off = (found[name] - exact).abs().max().item()
        assert off <= units * exact.abs().max().item(), name
    for name, exact in theirs.items():
        torch.testing.assert_close(after[name], exact, rtol=units, atol=units)
