"""From a config to the parts of a trainer: device, precision, data, model; each with its reason.

What depends on the machine is chosen here, and a setting that this machine cannot honour is refused
with a sentence that says what to set instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speedrun.config.schedule import try_schedule
from speedrun.config.schema import Config, MachineConfig
from speedrun.data.dataset import Dataset
from speedrun.data.find import load_tokenizer_if_any, open_dataset
from speedrun.data.loader import Loader
from speedrun.data.tokenizer import Tokenizer
from speedrun.data.validation import ValidationBatches
from speedrun.errors import ConfigError
from speedrun.hardware import matmul_flops, probe_bf16
from speedrun.limits import MemoryLimit, memory_shares
from speedrun.model.gpt import GPT
from speedrun.model.kernels import choose_kernels, interpreted, use_kernels
from speedrun.model.parts import Parts
from speedrun.model.plan import AttentionPlanner
from speedrun.model.planned import Planned
from speedrun.model.rehearsal import stand_in_for_a_gpu
from speedrun.model.trial import try_out
from speedrun.optim.build import build_optimizer
from speedrun.optim.orthogonalize import native_dtype
from speedrun.train.estimate import (
    beyond,
    least_more,
    recomputed,
    sequences_that_fit,
    taken,
    vocab_size_of,
    without_storage,
)
from speedrun.train.memory import Systems, passes_that_fit
from speedrun.train.world import World


def choose_device(requested: str) -> torch.device:
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "machine.device = 'cuda' cannot be used: torch sees no CUDA device here; "
            "set machine.device=cpu"
        )
    cuda = requested in ("auto", "cuda") and torch.cuda.is_available()
    return torch.device("cuda" if cuda else "cpu")


def choose_precision(
    requested: str, device: torch.device, *, rehearsal: bool = False
) -> tuple[torch.dtype, str]:
    """The dtype of products, and why; refuses what this machine does badly."""
    if device.type == "cuda" or rehearsal:
        if requested == "fp32":
            return torch.float32, "asked for"
        if requested == "auto" and not rehearsal and native_dtype(device) != torch.bfloat16:
            return torch.float32, "this GPU has no fast bf16"
        return torch.bfloat16, "what GPUs do fast"
    if requested != "bf16":
        return torch.float32, "what every CPU does well"
    return torch.bfloat16, f"asked for; {_gain_of_bf16('machine.precision'):.1f} times fp32 here"


def check_muons_dtype(config: Config, device: torch.device) -> None:
    """Refuse bf16 that this CPU does badly; a rehearsal takes the time it takes."""
    muon, rehearsal = config.optimizer.muon, config.machine.rehearsal
    used = config.optimizer.kind == "muon" and muon.dtype == "bf16"
    if used and device.type == "cpu" and not rehearsal:
        _gain_of_bf16("optimizer.muon.dtype")


def _gain_of_bf16(key: str) -> float:
    """How many times the speed of fp32 products this CPU has in bf16; refuses less than one."""
    probe, fp32 = probe_bf16(), matmul_flops()
    if probe.flops is None:
        why = f"in a bf16 matmul {probe.failure}"
    elif probe.flops < fp32:
        rates = f"{probe.flops / 1e9:.1f} GFLOP/s against {fp32 / 1e9:.0f} in fp32"
        why = f"its matmul reaches {rates}"
    else:
        return probe.flops / fp32
    raise ConfigError(f"{key} = 'bf16' cannot be used on this CPU: {why}; set {key}=fp32")


@dataclass(frozen=True)
class TrainingData:
    """This rank's share of the data."""

    dataset: Dataset
    tokenizer: Tokenizer | None
    token_bytes: Tensor | None  # UTF-8 bytes of each id, for bits per byte
    loader: Loader
    validation: ValidationBatches
    microbatches: int  # forward passes of a step
    notes: tuple[str, ...]


def open_data(
    config: Config, world: World, folder: Path, dtype: torch.dtype, start: int
) -> TrainingData:
    """The dataset in `folder`, its loader at global batch `start`."""
    dataset = open_dataset(folder)
    tokenizer, why = load_tokenizer_if_any(dataset)
    notes = [f"no bits per byte and no samples in this run: {reason}" for reason in why]
    length = config.batch.length
    memory = memory_of(world)
    microbatches = passes_of_step(config, dataset.vocab_size, world, memory[0].amount, dtype)
    rows = config.batch.tokens // length // world.size // microbatches
    refuse_too_large(config, dataset.vocab_size, world, memory, rows, dtype)
    shared: dict[str, Any] = {
        "seq_len": length,
        "vocab_size": dataset.vocab_size,
        "eot": dataset.eot,
        "device": world.device,
        "pinned": config.machine.pinned,
    }
    validation = ValidationBatches(
        dataset.split("val"),
        tokens=config.validation.tokens,
        batch_tokens=math.gcd(rows, config.validation.tokens // length) * length,
        how=config.validation.rows,
        **shared,
    )
    loader = Loader(
        dataset.split("train"),
        batch_tokens=config.batch.tokens,
        seed=config.train.seed,
        order=config.data.order,
        rank=world.rank,
        world=world.size,
        start=start,
        prefetch=config.machine.prefetch,
        **shared,
    )
    sizes = torch.from_numpy(tokenizer.token_bytes()).to(world.device) if tokenizer else None
    return TrainingData(dataset, tokenizer, sizes, loader, validation, microbatches, tuple(notes))


def passes_of_step(
    config: Config, vocab_size: int, world: World, memory: int, dtype: torch.dtype
) -> int:
    """The fewest forward passes with which a rank fits, by what a CPU was seen to keep of a
    sequence, and for a GPU as `speedrun plan` has it."""
    if world.device.type == "cpu":
        fits = sequences_that_fit(config, vocab_size, memory, dtype.itemsize)
        return config.microbatches(world.size, fits)
    model, shares = without_storage(config, vocab_size), config.machine.share_gradients
    systems = Systems(world.size, dtype.itemsize, shares_gradients=shares)
    return passes_that_fit(config, model, systems, memory / config.machine.jobs)[0]


def memory_of(world: World) -> list[MemoryLimit]:
    """What this rank may have, the least first."""
    if world.device.type == "cpu":
        return memory_shares(world.local_size)
    total = torch.cuda.get_device_properties(world.device).total_memory  # one rank's own
    return [MemoryLimit(total, total, f"all that {world.device} has", each=True)]


def refuse_too_large(
    config: Config,
    vocab_size: int,
    world: World,
    memory: Sequence[MemoryLimit],
    rows: int,
    dtype: torch.dtype,
) -> None:
    """What does not fit is told with who limits it before it is built, not killed later."""
    here = world.device.type == "cpu"
    # Of a GPU only what is sure: its kernels keep less of a row than a CPU's.
    more, least = (
        least_more(one, vocab_size, rows if here else 1, dtype.itemsize)
        for one in (config, recomputed(config))
    )
    for limit in memory:
        before = taken(limit) if here else 0
        if text := beyond(before + more, limit, before + least):
            raise ConfigError(text)


def choose_compile(
    requested: str, device: torch.device, *, rehearsal: bool = False
) -> tuple[str, str]:
    """What torch.compile is given: none, block or model; and why."""
    if rehearsal and requested == "none":
        raise ConfigError(
            "machine.compile = 'none' cannot be rehearsed: attention on a GPU is compiled, and a "
            "rehearsal does it with the rest; set machine.compile=block or auto"
        )
    if requested != "auto":
        return requested, ", as asked"
    if device.type == "cuda" or rehearsal:
        return "model", ""
    return "none", ": on a CPU our own kernels do it without the wait"


def choose_guards(config: Config, device: torch.device) -> bool:
    """Whether compiled code may leave guards out: a number that changed would not be noticed.

    None of ours does, which rehearsals see to; code of a user's own is not known.
    """
    if config.machine.guards != "auto":
        return config.machine.guards == "few"
    return device.type == "cuda" and not config.used_code()


def unread_switches(config: Config, world: World, *, compiles: bool) -> list[str]:
    """Of `machine`, what is set and does nothing in this run, whoever races it."""
    several, on_gpu = world.size > 1, world.device.type == "cuda"
    read = {
        "share_gradients": (several, "there is one rank"),
        "bucket_views": (several, "there is one rank"),
        "overlap_gathers": (several, "there is one rank"),
        "pinned": (on_gpu, "no GPU copies from it"),
        "guards": (compiles, "nothing is compiled"),
        "kernels": (on_gpu or interpreted(), f"there are none for {world.device.type}"),
    }
    usual = MachineConfig()
    return [
        f"machine.{key} changes nothing here: {why}"
        for key, (used, why) in read.items()
        if not used and getattr(config.machine, key) != getattr(usual, key)
    ]


def gpu_kernels(config: Config, device: torch.device) -> list[str]:
    """Compute with them from here on, in this process, where the config and the device say so; and
    what to say of it: nothing where there is no GPU."""
    rehearsal = config.machine.rehearsal
    chosen, why = choose_kernels(config.machine.kernels, device, rehearsal=rehearsal)
    use_kernels(chosen, device)
    told = chosen == "triton" or device.type == "cuda"
    return [f"{chosen} for loss, MLP, Muon and bf16 tables: {why}"] if told else []


def build_model(config: Config, vocab_size: int, dtype: torch.dtype, device: torch.device) -> GPT:
    """The model with the initial weights of the run's seed."""
    torch.manual_seed(config.train.seed)
    model = GPT(config.model, vocab_size, config.batch.length, Parts.of(config))
    model.set_precision(dtype).to(device)
    model.recompute = config.machine.recompute
    model.roles()  # a parameter without one is told first
    if model.custom:
        try_out(model, AttentionPlanner(config, device, dtype).backend, trains=True)
    try_schedule(config)
    return model


def compile_passes(passes: Planned, chosen: str, *, rehearsal: bool) -> None:
    """As `choose_compile` says: with its plan as one graph, or block by block, or not."""
    # What a compiler finds is the same, whatever makes kernels of it; this one makes none.
    backend = "aot_eager" if rehearsal else "inductor"
    # Blocks of one form share a graph: their weights are inputs of it.
    found = {"model": [passes], "block": [*passes.model.blocks], "none": []}[chosen]
    for module in found:
        module.compile(backend=backend, fullgraph=True, dynamic=False)


def try_code(config: Config) -> None:
    """Refuse code of a user's own that no run could be made with, before many runs are begun."""
    if not config.used_code():
        return
    device = choose_device(config.machine.device)
    rehearsal = config.machine.rehearsal
    if rehearsal:
        stand_in_for_a_gpu()
    dtype, _ = choose_precision(config.machine.precision, device, rehearsal=rehearsal)
    model = build_model(config, vocab_size_of(config), dtype, device)
    build_optimizer(model.named_roles(), config)
