"""The kernels for CUDA without a GPU: interpreted beside their formulas, and compiled for chips.

Triton decides when it is imported whether it interprets, so what is interpreted runs in processes
of its own: tests/integration/interpreted, a file for each kernel.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from speedrun.model.kernels import loss, mlp
from speedrun.train.build import choose_device
from speedrun.train.trainer import Trainer
from speedrun.train.world import World
from tests.train.heard import Make
from tests.waiting import PATIENCE
from tools.kernels.cases import CASES, Case
from tools.kernels.compiled import SHARED, DoesNotFitError, compiled
from tools.kernels.table import table

ROOT = Path(__file__).parents[2]
INTERPRETED = sorted((Path(__file__).parent / "interpreted").glob("[a-z]*.py"))
pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]


@pytest.fixture(autouse=True)
def _triton() -> None:
    pytest.importorskip("triton", reason="NOT TESTED: kernels for CUDA; `make integration` does it")


@pytest.mark.parametrize(
    "path", [path for path in INTERPRETED if path.stem != "twins"], ids=lambda path: path.stem
)
def test_interpreted(path: Path) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        words, env=environment, cwd=ROOT, capture_output=True, text=True,
        timeout=4 * PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compiled(case: Case, arch: int) -> None:
    """With the settings of its launcher; registers and shared memory are there, nothing spills."""
    for one in compiled(case.call, arch):
        print(one.name, f"sm_{arch}", one.threads, one.registers, one.shared, one.spills)
        one.check()
        assert one.threads * one.registers <= 65_536, "what a multiprocessor has"


def test_threads_load_16_bytes_of_logits_at_once() -> None:
    """Where the vocabulary is a multiple of 16, as padded ones are."""
    (one,) = compiled(CASES[0].call, 90)
    assert one.ptx.count("ld.global.v4.b32") == 4  # two in each loop
    assert "st.global.v4.b32" in one.ptx


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "BLOCK", 65_536)
    monkeypatch.setattr(loss, "WARPS", 32)
    (one,) = compiled(CASES[0].call, 90)
    with pytest.raises(DoesNotFitError, match=r"spills \d+ bytes on sm_90"):
        one.check()


def test_tiles_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (case for case in CASES if case.name == "MLP, up")
    monkeypatch.setattr(mlp, "tiles", lambda *_: (128, 128, 64, 8, 8))
    (one,) = compiled(case.call, 90)
    with pytest.raises(
        DoesNotFitError, match=r"takes 2\d\d\.\d KiB of shared memory, and sm_90 has"
    ):
        one.check()


@pytest.mark.parametrize(
    ("arch", "instruction"),
    [(80, "mma.sync.aligned.m16n8k16"), (90, "wgmma.mma_async"), (100, "tcgen05.mma")],
)
def test_products_are_those_of_the_chip(arch: int, instruction: str) -> None:
    """Which the compiler falls back from, without a word, where a tile does not suit them."""
    for case in CASES:
        if case.tensor_cores and case.stated:
            for one in compiled(case.call, arch):
                assert instruction in one.ptx, case.name


@pytest.mark.gpu
def test_a_step_on_a_gpu_is_that_of_torch(tiny: Make) -> None:
    if not torch.cuda.is_available():
        pytest.skip("NOT TESTED: there is no GPU that torch can use; where there is: make gpu")
    found: dict[str, dict[str, torch.Tensor]] = {}
    for chosen in ("torch", "triton"):
        config = tiny("model.layers=4", "model.width=64", "batch.length=512", "batch.tokens=1024",
                      "validation.tokens=1024", "machine.device=cuda", f"machine.kernels={chosen}",
                      recipe="record-18")  # fmt: skip
        trainer = Trainer(config, World.alone(choose_device("cuda")), Path(config.data.dir))
        with trainer.loader:
            trainer.apply_settings()
            found[chosen] = {"loss": trainer.forward_backward(next(trainer.loader)).double()}
        for name, parameter in trainer.model.named_parameters():
            if parameter.grad is not None:
                found[chosen][name] = parameter.grad.double()
        trainer.optimizer.step()
        assert all(p.isfinite().all() for p in trainer.model.parameters())
    for name, exact in found["torch"].items():
        off = (found["triton"][name] - exact).abs().max().item()
        assert off <= 0.03 * exact.abs().max().item(), name


def test_the_page_has_what_is_printed() -> None:
    assert table() in (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
