"""Which backend is chosen, what it refuses, and what preparing it does."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from speedrun.config.resolve import resolve
from speedrun.errors import ConfigError
from speedrun.model import backend, native
from speedrun.model.backend import choose_backend, prepare_backend
from speedrun.model.gpt import GPT
from speedrun.model.plan import AttentionPlanner, plan_layer

from .reference import assert_attends, inputs
from .test_mask import pairs

CPU = torch.device("cpu")
REHEARSAL = ["machine.device=rehearsal"]


def test_backends_are_chosen_by_device_and_say_why() -> None:
    assert choose_backend(torch.device("cuda", 0), tokens=65_536) == ("flex", "chosen for cuda")
    assert choose_backend(CPU, tokens=65_536) == ("blocks", "chosen for cpu")
    assert choose_backend(CPU, "dense", tokens=512) == ("dense", "asked for")
    assert "128-token blocks" in prepare_backend("flex", 128)
    assert "at most 4096 tokens" in prepare_backend("dense", 64)
    assert "head dim 20" in prepare_backend("blocks", 20)


@pytest.mark.parametrize("words", [[], ["machine.attention=dense"]])
def test_only_flex_can_do_without_full_blocks(words: list[str]) -> None:
    config = resolve("record-18", "nano", ["machine.full_blocks=false", *words]).config
    with pytest.raises(ConfigError, match="only FlexAttention tells full blocks"):
        AttentionPlanner(config, CPU)
    there = resolve("record-18", "nano", ["machine.full_blocks=false", *REHEARSAL]).config
    planner = AttentionPlanner(there, CPU)
    planner.set_window(3)
    mask = planner.plan(torch.zeros(1, 512, dtype=torch.int32)).for_layer(0).mask
    assert isinstance(mask, BlockMask)
    assert mask.full_kv_num_blocks is not None
    assert not mask.full_kv_num_blocks.any()


def test_only_preparing_builds_kernels_and_sets_up_the_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load, keep = Mock(return_value="the test says so"), Mock(return_value=True)
    monkeypatch.setattr(native, "load", load)
    monkeypatch.setattr(backend, "_keep_freed_memory", keep)
    config = resolve("record-18", "nano").config
    planner = AttentionPlanner(config, CPU)
    planner.set_window(1)
    planner.plan(torch.zeros(1, 512, dtype=torch.int32))
    with torch.device("meta"):  # as a dry run counts parameters
        GPT(config.model, 512, 512)
    assert not load.called
    assert not keep.called
    assert prepare_backend(planner.backend, 64).endswith("freed memory kept for the next step")
    assert load.called
    assert keep.called


@pytest.mark.parametrize(
    ("device", "requested", "tokens", "dtype", "complaint"),
    [
        ("cpu", "flash", 512, torch.float32, "'flash' is unknown"),
        ("cpu", "flex", 512, torch.float32, "'flex' has no backward on cpu; use 'blocks'"),
        ("cuda", "blocks", 512, torch.bfloat16, "'blocks' runs on cpu only; use 'flex'"),
        ("cpu", "blocks", 512, torch.bfloat16, "computes in torch.float32, not torch.bfloat16"),
        ("cpu", "dense", 8192, torch.float32, "at most 4096 tokens, not 8192"),
    ],
)
def test_a_backend_refuses_what_it_cannot_do(
    device: str, requested: str, tokens: int, dtype: torch.dtype, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        choose_backend(torch.device(device), requested, tokens=tokens, dtype=dtype)


@pytest.mark.parametrize(
    ("variable", "value", "complaint"),
    [
        ("CXX", "no-such-compiler", "no C++ compiler (no-such-compiler) is found"),
        ("CXX", "false", "false cannot build the kernels"),
        (native.SWITCH, "0", "SPEEDRUN_NATIVE=0 is set"),
    ],
)
def test_without_a_kernel_torch_takes_over(
    variable: str, value: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path))
    for name in (native.SWITCH, "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(native, "load", native.load.__wrapped__)
    how = prepare_backend("blocks", 64)
    assert "torch's CPU flash attention" in how
    assert "torch code for norms, products and the loss" in how
    assert complaint in how
    documents_BT = torch.arange(2, dtype=torch.int32).repeat_interleave(100)[None]
    tensors, plan = inputs(1, 2, 1, 200, 64), plan_layer("blocks", documents_BT, None)
    seen = pairs(documents_BT, None, "blocks")
    assert_attends(tensors, plan, seen, 0.125)
