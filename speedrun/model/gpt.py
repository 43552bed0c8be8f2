"""One GPT for every recipe: each technique of records 1 to 18 is a switch of `ModelConfig`.

`forward` is the whole computation from token ids to loss. Parameters have roles (hidden matrix,
fused q/k/v matrix, embedding, value embedding, token pairs, head, scalar) that decide which
optimizer rule they follow; a role comes from what the parameter is, never from its name.

Shapes: B batch, T time, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedrun.config.schema import ModelConfig
from speedrun.model.attention import AttentionPlan
from speedrun.model.block import Block
from speedrun.model.cache import Cache
from speedrun.model.embeddings import Bigrams, Table, ValueEmbeddings, tokens_before
from speedrun.model.fused import cross_entropy, rms_norm, softcap
from speedrun.model.linear import Linear, Norm
from speedrun.model.rotary import Rotary

MATRICES = ("hidden", "qkv", "head")  # roles that are matrix multiplications


class GPT(nn.Module):
    def __init__(self, config: ModelConfig, vocab_size: int, length: int) -> None:
        super().__init__()
        self.config, self.vocab_size, self.length = config, vocab_size, length
        padded = -(-vocab_size // config.vocab_multiple) * config.vocab_multiple
        rows = padded if config.pad_embeddings or config.tied_head else vocab_size
        table_role = "head" if config.tied_head else "embedding"
        self.embedding = Table(rows, config.width, role=table_role, as_head=config.tied_head)
        self.bigrams = Bigrams(config.bigram_rows, config.width) if config.bigram_rows else None
        learned = config.positions == "learned"
        self.positions = Table(length, config.width, role="embedding") if learned else None
        half = config.positions == "half-rotary"
        self.rotary = None if learned else Rotary(config.size_of_head, length, half)
        self.value_embeddings = ValueEmbeddings(config, rows)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.skips = nn.Parameter(torch.ones(config.layers // 2)) if config.unet_skips else None
        self.norm = Norm(config)
        self.head = None
        if not config.tied_head:
            self.head = Linear(
                config.width, padded, bias=False, zero=config.zero_init_head, role="head"
            )
        if config.init == "gpt2":
            init_as_gpt2(self)

    def forward(
        self,
        ids_BT: Tensor,
        plan: AttentionPlan,
        targets_BT: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Mean loss in nats per token, or the logits when there are no targets."""
        x = self.embedding(ids_BT)
        if self.positions is not None:
            start = 0 if cache is None else cache.length
            x = x + self.positions.weight[start : start + ids_BT.size(1)]
        if self.bigrams is not None:
            x = x + self.bigrams(ids_BT, tokens_before(ids_BT, plan.opens, cache))
        if self.config.embedding_norm:
            x = rms_norm(x, self.config.norm_eps)
        x0, others = x, self.value_embeddings(ids_BT)
        layers = [None] * len(self.blocks) if cache is None else cache.layers
        encoded: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            if self.skips is not None and layer >= len(self.skips):
                x = x + self.skips[layer - len(self.skips)] * encoded.pop()
            x, values = block(x, x0, others[layer], self.rotary, plan, layers[layer])
            if self.skips is not None and layer < len(self.skips):
                encoded.append(x)
            if self.config.value_residual and layer == 0:
                others = [values] * len(self.blocks)
        if cache is not None:
            cache.take(ids_BT)
        x = self.norm(x)
        if targets_BT is None:
            return self.logits(x)
        return cross_entropy(self.scores(x), targets_BT, self.config.softcap)

    def scores(self, x_BTD: Tensor) -> Tensor:
        """The logits before the softcap."""
        head = self.embedding.weight if self.head is None else self.head.weight
        return F.linear(x_BTD, head.to(x_BTD.dtype))

    def logits(self, x_BTD: Tensor) -> Tensor:
        return softcap(self.scores(x_BTD), self.config.softcap)

    def set_precision(self, dtype: torch.dtype) -> Self:
        """Tables, and so all activations, in `dtype`; matrices and scalars keep fp32 masters."""
        for module in self.modules():
            if isinstance(module, Table):
                module.to(dtype)
        return self

    def roles(self) -> dict[str, str]:
        """The role of each parameter by name."""
        return {
            f"{prefix}.{name}".lstrip("."): getattr(module, "role", "scalar")
            if parameter.ndim > 1
            else "scalar"
            for prefix, module in self.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
        }


@torch.no_grad()
def init_as_gpt2(model: GPT) -> None:
    """Normal with 0.02, less by sqrt(2 layers) where a branch joins the stream; zeros stay zero."""
    for module in model.modules():
        if isinstance(module, (Linear, Table)) and not module.zero:
            module.weight.normal_(std=0.02)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.mlp.down.weight.mul_((2 * model.config.layers) ** -0.5)
        if block.attention is not None:
            block.attention.output.weight.mul_((2 * model.config.layers) ** -0.5)
