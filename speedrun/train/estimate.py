"""What a config will cost, before it runs: parameters, FLOPs per token, memory.

Parameters are counted on the model itself, built without storage on the meta device. FLOPs count
every matrix multiplication exactly, attention included, forward once and backward twice. Memory is
an estimate of weights, gradients, optimizer state and the activations one forward pass keeps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from speedrun.config.schedule import window_at
from speedrun.config.schema import Config
from speedrun.data.dataset import Dataset
from speedrun.data.shards import PUBLIC_VOCAB
from speedrun.data.tokenizer import MIN_BPE, parse_spec
from speedrun.errors import ConfigError
from speedrun.hardware import peak_memory_bytes
from speedrun.limits import MemoryLimit, threads
from speedrun.model.gpt import GPT
from speedrun.model.mask import first_key
from speedrun.model.parts import Parts
from speedrun.model.roles import MATRICES
from speedrun.optim.build import expected_state_bytes

RUNTIME_BYTES = 400 << 20  # resident size of Python with torch loaded, measured at 0.35 to 0.4 GB
# Floats kept per token and layer for the backward pass, in widths, and per token in vocabularies:
# norms, q, k and v, attention output, the MLP's hidden tensors; logits and their gradient. Set so
# that the nano step's estimate, 0.98 GB, is near the 1.05 GB measured.
KEPT_WIDTHS = 16
KEPT_STREAM = 2  # of these: what enters attention and MLP, in the stream's numbers
KEPT_LOGITS = 2
THREAD_ADDRESSES = 72 << 20  # bytes: a stack, and an arena of malloc
USABLE = 0.6  # share of the machine's memory that a run plans to fill


@dataclass(frozen=True)
class Estimate:
    parameters: dict[str, int]  # by role, as the optimizer groups them
    flops_per_token: int
    microbatches: int  # forward passes per step and rank
    memory: dict[str, int]  # bytes of a rank, by what they hold
    guessed: list[str]  # optimizers of others, whose state is taken to be as large as Adam's

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())


def vocab_size_of(config: Config) -> int:
    """Without building anything: from the dataset's manifest, or from the tokenizer's name."""
    if config.data.dir:
        return Dataset.open(Path(config.data.dir).expanduser()).vocab_size
    spec = parse_spec(config.data.tokenizer)
    return {"byte": MIN_BPE, "gpt2": PUBLIC_VOCAB}.get(spec.kind, spec.size)


def visible_keys(config: Config, samples: int = 100) -> float:
    """Keys a query sees, on average over a row and a run, were each row one document."""
    row = torch.zeros(1, config.batch.length, dtype=torch.int32)
    steps = (config.steps * i // samples for i in range(samples))
    times = Counter(window_at(config, step) for step in steps)

    def keys(window: int | None) -> float:
        size = None if window is None else torch.tensor(window)
        first = first_key(row, size, config.attention.window)
        return (torch.arange(row.size(1)) - first + 1).double().mean().item()

    return sum(count * keys(window) for window, count in times.items()) / samples


def flops_per_token(config: Config, model: GPT, visible: float | None = None) -> int:
    """Multiply-adds count two. `visible`: keys a query sees; None: what `visible_keys` says."""
    roles = model.roles()
    weights = sum(p.numel() for n, p in model.named_parameters() if roles[n] in MATRICES)
    keys = visible_keys(config) if visible is None else visible
    attending = config.model.layers - len(config.model.attention_free)
    attention = 4 * keys * config.model.heads * config.model.size_of_head * attending
    return round(3 * (2 * weights + attention))


def sequence_bytes(config: Config, vocab_size: int, itemsize: int = 4) -> int:
    """Memory of the activations that one sequence keeps for its backward pass."""
    multiple = config.model.vocab_multiple
    logits = KEPT_LOGITS * -(-vocab_size // multiple) * multiple
    layers, width = config.model.layers, config.model.width
    stream = stream_itemsize(config, itemsize) * width
    per_layer = itemsize * (KEPT_WIDTHS - KEPT_STREAM) * width + KEPT_STREAM * stream
    # What is computed again is there for one layer at a time, and what enters each of them.
    kept = per_layer + layers * stream if config.machine.recompute else layers * per_layer
    return config.batch.length * (kept + itemsize * logits)


def stream_itemsize(config: Config, itemsize: int) -> int:
    """Bytes of a number of the tables and the stream, where products have some of `itemsize`."""
    return itemsize if config.model.stream == "bf16" else 4


def sequences_that_fit(config: Config, vocab_size: int, memory: int, itemsize: int = 4) -> int:
    """How many sequences a forward pass may take where there are `memory` bytes; at least one.

    It depends on the size of the machine, not on what is free, so that a run repeats exactly.
    """
    beside = max(0, memory - 2 * RUNTIME_BYTES)  # where little is left beside the process itself
    share = min(int(USABLE * memory), beside) // config.machine.jobs
    return max(1, share // sequence_bytes(config, vocab_size, itemsize))


def least_weights(config: Config, vocab_size: int) -> int:
    """How many weights a model has at least: matrices and tables, counted without building it."""
    model, custom = config.model, config.custom
    attention = 2 * (model.heads + model.groups) * model.size_of_head
    attending = model.layers - len(set(model.attention_free))
    mlp = 2 * model.layers * model.mlp_ratio * model.width
    if custom.block.use or custom.attention.use:  # a user's own may have fewer
        attending = 0
    if custom.block.use or custom.mlp.use:
        mlp = 0
    tables = 1 if model.tied_head else 2
    if model.value_embeddings != "none":
        tables += model.value_tables if model.value_embeddings == "ends" else model.layers // 2
    rows = tables * vocab_size + model.bigram_rows
    return model.width * (attending * attention + mlp + rows)


class _WithoutValues(TorchFunctionMode):
    """Draws no initial weights: the meta device has none, and to find that out torch imports its
    compiler there, which takes longer than all the rest of a dry run."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        if func in (torch.Tensor.normal_, torch.Tensor.uniform_):
            return args[0]
        return func(*args, **(kwargs or {}))


def without_storage(config: Config, vocab_size: int) -> GPT:
    """The model without values, unless code of a user's own cannot be built so."""
    sizes, parts = (config.model, vocab_size, config.batch.length), Parts.of(config)
    try:
        with torch.device("meta"), _WithoutValues():
            return GPT(*sizes, parts)
    except ConfigError:
        return GPT(*sizes, parts)


def estimate(config: Config, vocab_size: int, ranks: int, memory: int) -> Estimate:
    """`memory`: bytes that each rank may have."""
    model = without_storage(config, vocab_size)
    roles = model.roles()
    parameters: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameters[config.optimizer.group(roles[name])] += parameter.numel()
    passes = config.microbatches(ranks, sequences_that_fit(config, vocab_size, memory))
    rows = config.batch.tokens // config.batch.length // ranks // passes
    moments, guessed = expected_state_bytes(model.named_roles(), config, ranks)
    return Estimate(
        parameters=dict(parameters),
        flops_per_token=flops_per_token(config, model),
        microbatches=passes,
        memory={
            "Python and torch": RUNTIME_BYTES,
            "weights": 4 * parameters.total(),
            "gradients": 4 * parameters.total(),
            "moments": moments,
            "activations": rows * sequence_bytes(config, vocab_size),
        },
        guessed=guessed,
    )


def taken(limit: MemoryLimit) -> int:
    """What of a limit for this host's memory a rank has by now, before its model is built."""
    if not limit.each:
        return peak_memory_bytes()  # what was touched
    # Of addresses also what is mapped only, and what threads will map.
    return limit.amount - limit.free + 2 * threads() * THREAD_ADDRESSES


def least_more(config: Config, vocab_size: int, rows: int, itemsize: int = 4) -> int:
    """What a rank takes at least: weights, gradients, one moment, and the rows of a pass."""
    weights = 3 * itemsize * least_weights(config, vocab_size)
    return weights + rows * sequence_bytes(config, vocab_size, itemsize)


def recomputed(config: Config) -> Config:
    """The same run from less memory."""
    machine = config.machine.model_copy(update={"recompute": True})
    return config.model_copy(update={"machine": machine})


def beyond(needed: int, memory: MemoryLimit, least: int) -> str:
    """What to say of a rank that needs so many bytes of this; nothing where it fits.

    `least` is what it would need if blocks were computed again.
    """
    if needed <= memory.amount:
        return ""
    first = "set machine.recompute=true, " if least <= memory.amount else ""
    return (
        f"this run needs about {needed / 2**30:,.3g} GiB of memory a process, and there are "
        f"{memory}: {first}make model.width, model.layers or batch.length smaller, or give it more "
        "memory"
    )
