from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from speedrun import limits
from speedrun.config.files import names
from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.errors import ConfigError
from speedrun.limits import MemoryLimit, memory_shares
from speedrun.model import native
from speedrun.model.gpt import GPT
from speedrun.model.mask import dense_mask
from speedrun.plan.chips import Node
from speedrun.plan.predict import plan
from speedrun.train.build import memory_of, passes_of_step, refuse_too_large
from speedrun.train.estimate import (
    estimate,
    flops_per_token,
    least_weights,
    sequences_that_fit,
    visible_keys,
    vocab_size_of,
    without_storage,
)
from speedrun.train.world import World

GIB = 1 << 30


def test_flops_are_those_of_every_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own counter on a forward and backward pass, with attention over all T x T pairs."""
    monkeypatch.setattr(native, "load", lambda: "the counter knows torch's products alone")
    from torch.utils.flop_counter import FlopCounterMode

    from speedrun.model.plan import AttentionPlan, plan_layer

    config = resolve("modern", "nano", ["model.layers=2", "batch.length=128"]).config
    model = GPT(config.model, 500, 128)
    ids = torch.zeros(2, 128, dtype=torch.int64)
    plan = AttentionPlan((plan_layer("dense", ids, None),))
    with FlopCounterMode(display=False) as counter:
        model(ids, plan, ids).backward()
    counted = counter.get_total_flops()
    # The counter leaves attention out on CPU, so it is compared without.
    assert flops_per_token(config, model, visible=0) * 256 == pytest.approx(counted, rel=0.01)
    attention = flops_per_token(config, model, visible=128) - flops_per_token(config, model, 0)
    assert attention == 3 * 4 * 128 * 192 * 2  # scores and values, 2 layers


def test_visible_keys_follow_the_window() -> None:
    assert visible_keys(resolve("modern", "nano").config) == 256.5
    words = ["attention.window=blocks", "attention.window_start=128", "attention.window_end=128"]
    config = resolve("modern", "nano", words).config
    seen = dense_mask(torch.zeros(1, 512, dtype=torch.int32), torch.tensor(1), "blocks")
    assert visible_keys(config) == pytest.approx(seen.sum().item() / 512)


def test_a_tied_head_is_one_matrix() -> None:
    tied, untied = (
        resolve("modern", "nano", [f"model.tied_head={word}"]).config for word in ("true", "false")
    )
    counts = [flops_per_token(c, GPT(c.model, 500, c.batch.length)) for c in (tied, untied)]
    assert counts[0] == counts[1]


def test_microbatches_follow_from_memory() -> None:
    words = ["data.dir=", "data.tokenizer=gpt2", "batch.length=1024", "attention.window_end=1024"]
    config = resolve("record-18", "small", words).config
    vocab = vocab_size_of(config)
    assert vocab == 50257
    large = estimate(config, vocab, 1, 4096 * GIB)
    small = estimate(config, vocab, 1, 24 * GIB)
    shared = estimate(config, vocab, 8, 3 * GIB)
    assert large.microbatches == 1
    assert 8 < small.microbatches <= 512
    assert small.memory_bytes < 24 * GIB < large.memory_bytes
    assert shared.microbatches * 8 >= small.microbatches
    assert sum(large.parameters.values()) == 275_742_772
    assert sequences_that_fit(config, vocab, 1) == 1
    at_once = resolve("record-18", "small", [*words, "machine.jobs=8"]).config
    assert (
        estimate(at_once, vocab, 1, 24 * GIB).microbatches
        == estimate(config, vocab, 1, 3 * GIB).microbatches
    )


def test_the_config_decides_if_it_says_so() -> None:
    config = resolve("modern", "nano", ["machine.microbatch=2"]).config
    assert config.microbatches(1, fits=1) == 8
    assert resolve("modern", "nano").config.microbatches(1, fits=5) == 4


def test_the_least_weights_are_never_more_than_there_are() -> None:
    for recipe in names("recipe"):
        config = resolve(recipe, "nano").config
        count = sum(p.numel() for p in without_storage(config, 4096).parameters())
        assert 0.7 * count < least_weights(config, 4096) <= count


def refuse(config: Config, *, ranks: int = 1, here: int = 1) -> None:
    world = World(0, ranks, here, torch.device("cpu"))
    memory = memory_of(world)
    fits = sequences_that_fit(config, 2048, memory[0].amount)
    rows = config.batch.tokens // config.batch.length // ranks // config.microbatches(ranks, fits)
    refuse_too_large(config, 2048, world, memory, rows, torch.float32)


@pytest.mark.parametrize("override", ["model.width=1048576", "batch.length=16777216"])
def test_what_no_memory_holds_is_refused_before_it_is_built(override: str) -> None:
    words = [override, "model.heads=2", "batch.tokens=16777216", "validation.tokens=16777216"]
    with pytest.raises(ConfigError, match=r"GiB of memory a process, and there are [\d.]+ GiB \("):
        refuse(resolve("modern", "nano", words).config)
    gpu = World(0, 1, 1, torch.device("cuda"))
    memory = [MemoryLimit(64 * GIB, 64 * GIB, "all that cuda:0 has", each=True)]
    with pytest.raises(ConfigError, match=r"there are 64 GiB \(all that cuda:0 has\): make"):
        refuse_too_large(
            resolve("modern", "nano", words).config, 4096, gpu, memory, 1, torch.bfloat16
        )
    refuse_too_large(resolve("modern", "nano").config, 4096, gpu, memory, 999_999, torch.bfloat16)


def test_a_run_that_cannot_fit_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speedrun.train.estimate.peak_memory_bytes", lambda: 350 << 20)
    small = resolve("modern", "nano").config
    large = resolve("modern", "nano", ["model.width=1536", "model.layers=24"]).config
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "4096")
    refuse(small)
    words = r"needs about [\d.]+ GiB of memory a process, and there are 4 GiB \(SLURM_MEM_PER_NODE"
    with pytest.raises(ConfigError, match=words):
        refuse(large)
    long = ["model.layers=24", "batch.length=16384", "batch.tokens=16384",
            "validation.tokens=16384"]  # fmt: skip
    with pytest.raises(ConfigError, match=r"SLURM.*: set machine\.recompute=true, make model"):
        refuse(resolve("modern", "nano", long).config)
    refuse(resolve("modern", "nano", [*long, "machine.recompute=true"]).config)
    # Two ranks of a host share its memory; one that is alone on its host has it all.
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "2000")
    deep = resolve("modern", "nano", ["model.width=576", "model.layers=12"]).config
    refuse(deep, ranks=2, here=1)
    with pytest.raises(ConfigError, match=r"0\.977 GiB \(a share of 2: SLURM_MEM_PER_NODE\)"):
        refuse(deep, ranks=2, here=2)


def test_a_limit_of_each_process_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks under `ulimit -v` have it twice, and do not make their passes smaller for it."""
    machine = 64 * GIB
    monkeypatch.setattr(limits, "machine_memory", lambda: (machine, machine))
    own = MemoryLimit(8 * GIB, 7 * GIB, "ulimit -v", each=True)
    monkeypatch.setattr(limits, "memory_limits", lambda: [own])
    assert memory_of(World(0, 4, 4, torch.device("cpu")))[0] == own
    assert [limit.amount // GIB for limit in memory_shares(16)] == [4, 8]
    assert memory_shares(16)[0].source == "a share of 16: all that this machine has"
    assert memory_shares()[0] == own


@pytest.mark.parametrize(
    "record", ["baseline", "record-03", "record-09", "record-11", "record-18", "best"]
)
def test_a_gpus_memory_is_one_ranks_own(record: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks with a GPU of 80 GB each: a rank's sequences are one pass, as published."""
    gpu = SimpleNamespace(total_memory=79 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    world = World(0, 8, 8, torch.device("cuda", 0))
    [memory] = memory_of(world)
    assert (memory.amount, memory.each) == (79 * GIB, True)
    config = resolve(record, "small").config
    assert passes_of_step(config, 50_257, world, memory.amount, torch.bfloat16) == 1


@pytest.mark.parametrize("record", ["baseline", "record-09", "record-18"])
def test_a_gpu_takes_as_many_passes_as_are_planned_for_it(record: str) -> None:
    config = resolve(record, "small", ["machine.recompute=true"]).config
    for name in ("H100", "4xH100", "RTX4090", "8xRTX4090"):
        node = Node.parse(name)
        world = World(0, node.count, node.count, torch.device("cuda", 0))
        passes = passes_of_step(config, 50_257, world, node.chip.memory, torch.bfloat16)
        assert passes == plan(config, 50_257, node).microbatches
    halved = resolve(record, "small", ["machine.recompute=true", "machine.jobs=2"]).config
    assert passes_of_step(halved, 50_257, world, node.chip.memory, torch.bfloat16) >= passes
    stated = resolve(record, "small", ["machine.microbatch=1"]).config
    rows = stated.batch.tokens // stated.batch.length // 8
    assert passes_of_step(stated, 50_257, world, node.chip.memory, torch.bfloat16) == rows
