"""What one rank has to do in one step: multiply, read and write, send; counted from the config.

Nothing here knows a machine. A `Work` is an amount of something that a chip does at some rate, and
`predict.py` divides the one by the other. Products are counted exactly, bytes as kernels move them
that a compiler has fused: once in and once out, whatever happens between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Literal, NamedTuple

import torch
from scipy.special import ndtri

from speedrun.config.architecture import BLOCK
from speedrun.config.optimizer import MATRIX_ROLES
from speedrun.config.schedule import window_at
from speedrun.config.schema import Config
from speedrun.model.gpt import GPT
from speedrun.model.mask import WindowUnit, block_lists, first_key
from speedrun.optim.orthogonalize import matmul_flops
from speedrun.train.memory import (
    FP32,
    TABLES,
    Systems,
    attending,
    count,
    mixed_values,
    shapes_of,
    stream_number,
)

# What the time of a piece of work is limited by. Each has a rate on a chip (chips.py), of which a
# share is reached (shares.json).
Limit = Literal["products", "attention", "masked", "memory", "orthogonal", "link", "steps"]

# Documents of the public text in tokens: log-normal, with this mean and deviation of the logarithm.
MEAN_DOCUMENT, SPREAD_OF_DOCUMENTS = 690, 1.0
SAMPLES = 14  # points of a run at which its growing window is looked at
ALIGNED = 8  # numbers of bf16 in 16 bytes: rows of other lengths are read in pieces, half as fast
ADAM = 7 * FP32  # bytes of a step of a number: it, its gradient and two moments read, three written


class Work(NamedTuple):
    part: str
    limit: Limit
    amount: float  # FLOPs, bytes, or steps


def work_of_run(config: Config, model: GPT, systems: Systems) -> list[Work]:
    """The mean step of a run. Of `model` the shapes alone are looked at."""
    middles = (int(config.steps * (i + 0.5) / SAMPLES) for i in range(SAMPLES))
    keys = [visited_keys(config, step) for step in middles]
    return work_of_keys(config, model, systems, sum(keys) / SAMPLES)


def work_of_step(config: Config, model: GPT, systems: Systems, step: int) -> list[Work]:
    return work_of_keys(config, model, systems, visited_keys(config, step))


def work_of_keys(config: Config, model: GPT, systems: Systems, keys: float) -> list[Work]:
    """A step in which a query's attention visits so many keys, on average."""
    return [
        *_products(config, model, systems),
        _attention(config, systems, keys),
        *_elementwise(config, model, systems),
        *_optimizer(config, model, systems),
        Work("waits", "steps", 1),
    ]


# What attention sees.


def visited_keys(config: Config, step: int) -> float:
    """Keys that are computed for a query at this step, on average: those of whole blocks."""
    mask = config.attention
    return _visited(config.batch.length, mask.documents, mask.window, window_at(config, step))


@cache
def _visited(tokens: int, documents: bool, unit: WindowUnit, window: int | None) -> float:
    numbers = document_numbers(tokens) if documents else torch.zeros(tokens, dtype=torch.int32)
    size = None if window is None else torch.tensor(window, dtype=torch.int32)
    lists = block_lists(first_key(numbers[None], size, unit))
    return BLOCK * float((lists.partial_count + lists.full_count).double().mean())


@cache
def document_numbers(tokens: int) -> torch.Tensor:
    """Which document each token of a typical row is of; lengths come in an order without pattern.

    Shares that go on by the golden ratio are spread evenly whatever their number.
    """
    golden = (math.sqrt(5) - 1) / 2
    middle = math.log(MEAN_DOCUMENT) - SPREAD_OF_DOCUMENTS**2 / 2
    lengths: list[int] = []
    while sum(lengths) < tokens:
        share = (0.5 + golden * len(lengths)) % 1
        lengths.append(math.ceil(math.exp(middle + SPREAD_OF_DOCUMENTS * float(ndtri(share)))))
    numbers = torch.arange(len(lengths), dtype=torch.int32)
    return torch.repeat_interleave(numbers, torch.tensor(lengths))[:tokens]


# Forward and backward.


def tokens_of_rank(config: Config, systems: Systems) -> float:
    return config.batch.tokens / systems.ranks


def _products(config: Config, model: GPT, systems: Systems) -> Iterator[Work]:
    """One product forward and two backward; what is computed again is one forward more."""
    tokens = tokens_of_rank(config, systems)
    hidden = count(shapes_of(model, *MATRIX_ROLES))
    products = 3 + config.machine.recompute
    yield Work("products of the blocks", "products", 2 * products * hidden * tokens)
    rows, width = model.head_weight.shape
    slower = 1 if rows % ALIGNED == 0 else 2
    yield Work("products of the head", "products", 6 * rows * width * tokens * slower)


def _attention(config: Config, systems: Systems, keys: float) -> Work:
    """Two products forward, five backward, where the scores are computed again."""
    it, mask = config.model, config.attention
    pairs = keys * attending(config) * tokens_of_rank(config, systems)
    masked = mask.documents or mask.window != "none"
    products = 2 + 5 + 2 * config.machine.recompute
    flops = 2 * products * it.heads * it.size_of_head * pairs
    return Work("attention", "masked" if masked else "attention", flops)


def _elementwise(config: Config, model: GPT, systems: Systems) -> Iterator[Work]:
    """In passes over (tokens, width)."""
    it, layers, number = config.model, attending(config), stream_number(config, systems)
    queries = it.heads * it.size_of_head / it.width
    values = it.groups * it.size_of_head / it.width
    through, add = 2, 3  # read and written; two read, one written
    # A branch is added to the stream and the norm before the next one taken in the same pass.
    stream = (layers + it.layers) * (add + 1)
    stream += through * it.layers * it.x0_mixing + add * (it.layers // 2) * it.unet_skips
    inner = layers * through * (queries + values)  # norm and positions of queries and keys
    inner += add * values * mixed_values(config)
    inner += it.layers * through * it.mlp_ratio
    tokens = tokens_of_rank(config, systems)
    # Backward three for two: the gradient and what was kept are read, a gradient is written.
    bytes_forward = it.width * tokens * (stream * number + inner * systems.number)
    passes = 2.5 + config.machine.recompute
    yield Work("norms, sums, activations", "memory", passes * bytes_forward)
    # A logit is written by the product, read by the loss and by its backward, which writes the
    # gradient; a cap keeps a result of its own, written and read.
    touched = (4 + 2 * bool(it.softcap)) * systems.number
    yield Work("loss", "memory", touched * tokens * model.head_weight.shape[0])


# The optimizer.


def _optimizer(config: Config, model: GPT, systems: Systems) -> Iterator[Work]:
    matrices = shapes_of(model, *MATRIX_ROLES)
    tables, head = count(shapes_of(model, *TABLES)), count(shapes_of(model, "head"))
    number, muon = systems.number, config.optimizer.kind == "muon"
    if muon:
        share = 1 / systems.ranks if systems.shares_muon else 1.0
        rounds = config.optimizer.muon.iterations
        flops = sum(
            math.prod(shape[:-2]) * matmul_flops(*shape[-2:], gram=False, iterations=rounds)
            for shape in matrices
        )
        yield Work("orthogonalisation", "orthogonal", flops * share)
        # Gradient and momentum are read and the momentum written by the owner; all apply.
        own, all_of_it = (3 * FP32 + number) * share, number + 2 * FP32
        yield Work("momentum and updates", "memory", count(matrices) * (own + all_of_it))
    else:
        share = 1 / systems.ranks if systems.shares_tables else 1.0
        yield Work("Adam of the matrices", "memory", ADAM * count(matrices) * share)
    # A table's gradient is dense: filled with zeros, added to, copied to where it is sent from.
    of_table = stream_number(config, systems)
    dense = 3 * of_table * tables
    step = (3 * of_table + 4 * systems.moment) * tables + ADAM * head
    share = 1 / systems.ranks if systems.shares_tables else 1.0
    yield Work("Adam of tables and head", "memory", dense + step * share)
    if systems.ranks == 1:
        return
    # A ring sends (ranks - 1) / ranks of the bytes for a gather, and twice that for a sum.
    ring = (systems.ranks - 1) / systems.ranks
    # The matrices' gradients go while the backward is under way; the tables' come last.
    times = 1 if systems.shares_gradients else 2
    yield Work("gradients of tables, sent", "link", times * ring * tables * of_table)
    if systems.shares_tables:
        rows = tables * of_table + (head + (0 if muon else count(matrices))) * FP32
        yield Work("rows of tables, sent", "link", ring * rows)
    if muon:
        yield Work("updates of matrices, sent", "link", ring * count(matrices) * number)
