"""How much memory a rank's step takes on a GPU, by what it is for.

Activations are those that a compiled step keeps for its backward pass: what costs a product to
compute again. Norms, rotations and activation functions are computed again, not kept.
"""

from __future__ import annotations

from speedrun.config.optimizer import MATRIX_ROLES
from speedrun.config.schema import Config
from speedrun.model.gpt import GPT
from speedrun.plan.work import (
    FP32,
    TABLES,
    Systems,
    attending,
    count,
    mixed_values,
    shapes_of,
    stream_number,
)

MIB = 2**20


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
