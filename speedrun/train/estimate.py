"""What a config will cost, before it runs: parameters, FLOPs per token, memory.

Parameters are counted on the model itself, built without storage on the meta device. FLOPs count
every matrix multiplication exactly, attention included, forward once and backward twice. Memory is
an estimate of weights, gradients, optimizer state and the activations one forward pass keeps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from speedrun.config.schema import Config
from speedrun.data.shards import PUBLIC_VOCAB, Dataset
from speedrun.data.tokenizer import MIN_BPE, parse_spec
from speedrun.model.gpt import GPT, MATRICES

RUNTIME_BYTES = 400 << 20  # resident size of Python with torch loaded, measured at 0.35 to 0.4 GB
# Floats kept per token and layer for the backward pass, in widths: norms, q, k, v before and after
# norm and rotation, attention output, three MLP tensors of four widths.
KEPT_WIDTHS = 28
KEPT_LOGITS = 3  # logits, their fp32 copy and the gradient


@dataclass(frozen=True)
class Estimate:
    parameters: dict[str, int]  # by role
    flops_per_token: int
    tokens: int
    memory_bytes: int

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())


def vocab_size_of(config: Config) -> int:
    """Without building anything: from the dataset's manifest, or from the tokenizer's name."""
    if config.data.dir:
        return Dataset.open(Path(config.data.dir).expanduser()).vocab_size
    spec = parse_spec(config.data.tokenizer)
    return {"byte": MIN_BPE, "gpt2": PUBLIC_VOCAB}.get(spec.kind, spec.size)


def flops_per_token(config: Config, model: GPT, visible: float | None = None) -> int:
    """Multiply-adds count two. `visible`: keys a query sees on average; None: causal rows."""
    roles = model.roles()
    weights = sum(p.numel() for n, p in model.named_parameters() if roles[n] in MATRICES)
    if model.head is None:
        weights += model.embedding.weight.numel()
    keys = (config.batch.length + 1) / 2 if visible is None else visible
    attending = config.model.layers - len(config.model.attention_free)
    attention = 4 * keys * config.model.heads * config.model.size_of_head * attending
    return round(3 * (2 * weights + attention))


def estimate(config: Config, vocab_size: int, ranks: int = 1) -> Estimate:
    with torch.device("meta"):
        model = GPT(config.model, vocab_size, config.batch.length)
    roles = model.roles()
    parameters: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameters[roles[name]] += parameter.numel()
    total = sum(parameters.values())
    rows = config.batch.tokens // config.batch.length // ranks // config.microbatches(ranks)
    per_token = KEPT_WIDTHS * config.model.layers * config.model.width
    logits = -(-vocab_size // config.model.vocab_multiple) * config.model.vocab_multiple
    activations = 4 * rows * config.batch.length * (per_token + KEPT_LOGITS * logits)
    return Estimate(
        parameters=dict(parameters),
        flops_per_token=flops_per_token(config, model),
        tokens=config.steps * config.batch.tokens,
        memory_bytes=RUNTIME_BYTES + 16 * total + activations,
    )
