"""How much memory a rank's step takes on a GPU, by what it is for.

Activations are those that a compiled step keeps for its backward pass: what costs a product to
compute again. Norms, rotations and activation functions are computed again, not kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from speedrun.config.optimizer import MATRIX_ROLES
from speedrun.config.schema import Config
from speedrun.model.embeddings import table_of_layer
from speedrun.model.gpt import GPT
from speedrun.train.estimate import stream_itemsize

MIB = 2**20
FP32 = 4
TABLES = ("embedding", "value_embedding", "bigram")  # roles of tables that are looked up
USABLE = 0.94  # of a GPU's memory: the rest is the context, NCCL's buffers, and holes


@dataclass(frozen=True)
class Systems:
    """How a step is carried out, where the config does not say so; by default as it is here."""

    ranks: int = 1
    number: int = 2  # bytes of an activation
    moment: int = FP32  # bytes of a moment of a table
    shares_muon: bool = True  # over the ranks
    shares_tables: bool = True  # likewise Adam's state and updates of tables and head
    shares_gradients: bool = True  # likewise the gradients of what is shared


def passes_that_fit(
    config: Config, model: GPT, systems: Systems, memory: float
) -> tuple[int, dict[str, float]]:
    """The fewest forward passes a step with which a rank fits into so many bytes, and what it needs
    then; those of the config, where it states them. The most there are, where none fits.
    """
    least = config.microbatches(systems.ranks)  # one pass, or what the config states; or a refusal
    sequences = config.batch.tokens // config.batch.length // systems.ranks
    most = least if config.machine.microbatch else sequences
    for passes in range(least, most + 1):
        if sequences % passes == 0:
            needed = memory_of_step(config, model, systems, passes)
            if sum(needed.values()) <= USABLE * memory:
                break
    return passes, needed


def memory_of_step(
    config: Config, model: GPT, systems: Systems, microbatches: int
) -> dict[str, float]:
    """Bytes by what they hold."""
    it, number = config.model, systems.number
    tables, head = count(shapes_of(model, *TABLES)), count(shapes_of(model, "head"))
    matrices, scalars = count(shapes_of(model, *MATRIX_ROLES)), count(shapes_of(model, "scalar"))
    weights = FP32 * (matrices + head + scalars) + stream_number(config, systems) * tables
    share = 1 / systems.ranks if systems.shares_muon else 1.0
    muon = config.optimizer.kind == "muon"
    of_tables = 1 / systems.ranks if systems.shares_tables else 1.0
    moments = FP32 * share * matrices if muon else 2 * FP32 * of_tables * matrices
    moments += 2 * FP32 * (head * of_tables + scalars) + 2 * systems.moment * of_tables * tables
    tokens = config.batch.tokens / systems.ranks / microbatches
    # The sums of a rank's own lie beside what it sends.
    split = systems.shares_gradients and systems.ranks > 1
    return {
        "weights": weights,
        "gradients": weights * (1 + split / systems.ranks),
        "moments": moments,
        "activations": tokens * number * it.width * _widths(config, systems),
        # As the product has them, and their gradient.
        "logits": 2 * number * tokens * model.head_weight.shape[0],
    }


def _widths(config: Config, systems: Systems) -> float:
    """Kept for the backward pass of one token, in widths."""
    it, layers = config.model, attending(config)
    queries = it.heads * it.size_of_head / it.width
    values = it.groups * it.size_of_head / it.width
    stream = stream_number(config, systems) / systems.number
    # The stream before each branch; queries and keys before and after their norm and positions;
    # values and what they are mixed with; the attention's output; the MLP before its activation.
    kept = (layers + it.layers) * stream
    kept += layers * (2 * (queries + values) + values + queries)
    kept += mixed_values(config) * 2 * values
    kept += it.layers * it.mlp_ratio
    if config.machine.recompute:  # one layer at a time, and what enters each of them
        kept = kept / it.layers + it.layers * stream + mixed_values(config) * values
    return kept + stream * (1 + it.x0_mixing)


def stream_number(config: Config, systems: Systems) -> int:
    """Bytes of a number of the stream, of a table, and of its gradient."""
    return stream_itemsize(config, systems.number)


def shapes_of(model: GPT, *roles: str) -> list[tuple[int, ...]]:
    return [tuple(one.shape) for _, one, role in model.named_roles() if role in roles]


def count(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))


def attending(config: Config) -> int:
    """Layers with attention."""
    return config.model.layers - len(set(config.model.attention_free))


def mixed_values(config: Config) -> int:
    """Layers that mix something into their values."""
    it = config.model
    if it.value_residual:
        return attending(config)
    if it.value_embeddings == "none":
        return 0
    return sum(table is not None for table in table_of_layer(it))
