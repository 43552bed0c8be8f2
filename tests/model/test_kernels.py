"""Whether kernels for GPUs are used, and the reasons; that nothing needs Triton to be imported."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from speedrun.config.resolve import resolve
from speedrun.errors import ConfigError
from speedrun.model import kernels
from speedrun.model.kernels import choose_kernels, use_kernels
from speedrun.train.build import unread_switches
from speedrun.train.world import World
from tests.waiting import PATIENCE

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_missing", lambda: "")


def of_capability(monkeypatch: pytest.MonkeyPatch, *found: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found)


@pytest.mark.usefixtures("_installed")
def test_they_are_chosen_by_device_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    of_capability(monkeypatch, 9, 0)
    assert choose_kernels("auto", CUDA) == ("triton", "chosen for cuda")
    assert choose_kernels("triton", CUDA) == ("triton", "asked for")
    assert choose_kernels("torch", CUDA) == ("torch", "asked for")
    chosen, why = choose_kernels("auto", CPU)
    assert chosen == "torch"
    assert why == "Triton makes kernels for CUDA, and this runs on cpu"
    of_capability(monkeypatch, 7, 5)
    chosen, why = choose_kernels("auto", CUDA)
    assert chosen == "torch"
    assert "capability 7.5" in why
    with pytest.raises(ConfigError, match=r"capability 7\.5.*set machine\.kernels=auto"):
        choose_kernels("triton", CUDA)


@pytest.mark.usefixtures("_installed")
def test_a_cpu_refuses_them_but_for_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.INTERPRET, raising=False)
    with pytest.raises(ConfigError, match=r"this runs on cpu; set machine\.kernels=auto"):
        choose_kernels("triton", CPU)
    chosen, why = choose_kernels("triton", CPU, rehearsal=True)
    assert chosen == "torch"
    assert "a rehearsal has the formulas" in why
    monkeypatch.setenv(kernels.INTERPRET, "1")
    for rehearsal in (True, False):
        chosen, why = choose_kernels("triton", CPU, rehearsal=rehearsal)
        assert chosen == "triton"
        assert "interpreter" in why
    assert choose_kernels("auto", CPU)[0] == "torch"


def test_without_triton_the_reason_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    of_capability(monkeypatch, 9, 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    install = r"triton is not installed \(pip install 'speedrun\[triton\]'\)"
    with pytest.raises(ConfigError, match=install):
        choose_kernels("triton", CUDA)
    monkeypatch.setenv(kernels.INTERPRET, "1")
    with pytest.raises(ConfigError, match=install):
        choose_kernels("triton", CPU)
    chosen, why = choose_kernels("auto", CUDA)
    assert chosen == "torch"
    assert "triton is not installed" in why


def test_they_are_for_tensors_of_their_device() -> None:
    x = torch.ones(1)
    assert not kernels.on(x)
    use_kernels("triton", CUDA)
    try:
        assert not kernels.on(x)
        use_kernels("triton", CPU)
        assert kernels.on(x)
    finally:
        use_kernels("torch", CPU)
    assert not kernels.on(x)


def test_asking_for_torch_where_nothing_else_is_changes_nothing() -> None:
    config = resolve("modern", "nano", ["machine.kernels=torch"]).config
    (said,) = unread_switches(config, World.alone(CPU), compiles=False)
    assert said == "machine.kernels changes nothing here: there are none for cpu"


ALONE = """
import sys
sys.modules["triton"] = None
import speedrun.train.trainer, speedrun.model.kernels.loss
"""


def test_everything_imports_without_triton() -> None:
    words = [sys.executable, "-c", ALONE]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
