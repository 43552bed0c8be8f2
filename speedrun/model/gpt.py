"""One GPT for every recipe: each technique of records 1 to 18 is a switch of `ModelConfig`.

`forward` is the whole computation from token ids to loss. The optimizer's options are per role of
a parameter (model/roles.py), which the module that owns it declares.

Shapes: B batch, T time, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from speedrun.config.architecture import ModelConfig
from speedrun.config.optimizer import Role
from speedrun.model.block import Block
from speedrun.model.cache import Cache
from speedrun.model.embeddings import Bigrams, Table, ValueEmbeddings, previous_tokens
from speedrun.model.fused import blend, rms_norm, softcap
from speedrun.model.initial import init_as_gpt2
from speedrun.model.linear import Linear, Norm
from speedrun.model.parts import OURS, Parts, named
from speedrun.model.plan import AttentionPlan
from speedrun.model.products import linear
from speedrun.model.roles import roles_of
from speedrun.model.rotary import Rotary


class GPT(nn.Module):
    parameter_roles: ClassVar[dict[str, Role]] = {"skips": "scalar"}

    def __init__(
        self, config: ModelConfig, vocab_size: int, length: int, parts: Parts = OURS
    ) -> None:
        super().__init__()
        self.config, self.vocab_size, self.length = config, vocab_size, length
        self.dtype = torch.float32  # of products
        self.recompute = False  # what blocks keep for the backward pass, there: machine.recompute
        padded = -(-vocab_size // config.vocab_multiple) * config.vocab_multiple
        rows = padded if config.pad_embeddings or config.tied_head else vocab_size
        table_role: Role = "head" if config.tied_head else "embedding"
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
        self.loss = parts.loss_of(config)
        if config.init == "gpt2":
            init_as_gpt2(self, config.layers)
        # Modules of a user's own code, by their names here.
        placed = parts.fit(self.blocks, config)
        self.custom = {f"blocks.{place}": part for place, part in placed.items()}
        if parts.loss is not None:
            self.custom["loss"] = parts.loss

    def forward(
        self,
        ids_BT: Tensor,
        plan: AttentionPlan,
        targets_BT: Tensor | None = None,
        cache: Cache | None = None,
        *,
        each: bool = False,
    ) -> Tensor:
        """The loss of training or of validation (`self.training`); without targets the logits.

        `each`: every token's own loss, where its target is not negative (`Loss.of_each`). With a
        cache only the last token's logits: they are a fourth of the time of a prompt.
        """
        x = self.embedding(ids_BT)
        if self.positions is not None:
            start = 0 if cache is None else cache.length
            x = x + self.positions.weight[start : start + ids_BT.size(1)]
        if self.bigrams is not None:
            x = x + self.bigrams(ids_BT, previous_tokens(ids_BT, plan.starts, cache))
        if self.config.embedding_norm:
            x = rms_norm(x, self.config.norm_eps)
        x0, value_inputs = x, self.value_embeddings(ids_BT)
        layers = [None] * len(self.blocks) if cache is None else cache.layers
        encoded: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            if self.skips is not None and layer >= len(self.skips):
                skip = self.skips[layer - len(self.skips)]
                x = blend(x, encoded.pop(), torch.ones_like(skip), skip)
            x, values = self.run(
                block, x, x0, value_inputs[layer], self.rotary, plan.for_layer(layer), layers[layer]
            )
            if self.skips is not None and layer < len(self.skips):
                encoded.append(x)
            if self.config.value_residual and layer == 0:
                value_inputs = [values] * len(self.blocks)
        if cache is not None:
            cache.advance(ids_BT)
        x = self.norm(x)
        if targets_BT is None:
            return self.logits(x if cache is None else x[:, -1:])
        if each:
            return self.loss.of_each(x, self.head_weight, targets_BT)
        loss: Tensor = self.loss(x, self.head_weight, targets_BT)
        return loss

    def run(self, block: nn.Module, *inputs: Any) -> Any:
        """A block, which keeps nothing but its inputs for the backward pass where told so."""
        if not (self.recompute and torch.is_grad_enabled()):
            return block(*inputs)
        # Random numbers are users' own: to give them out again takes asking a GPU for its state.
        draws = bool(self.custom)
        return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=draws)

    @property
    def blocks_are_ours(self) -> bool:
        """Whether everything between embedding and head is what this package has written."""
        return not any(place != "loss" for place in self.custom)

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def logits(self, x_BTD: Tensor) -> Tensor:
        return softcap(linear(x_BTD, self.head_weight), self.config.softcap)

    def set_precision(self, dtype: torch.dtype) -> Self:
        """Products in `dtype`, and with `stream` bf16 the tables and the stream between them.

        Other weights stay fp32, and so do tables where the stream does: those of records 2 to 9,
        whose small updates bf16 would round away.
        """
        self.dtype = dtype
        for module in self.modules():
            if isinstance(module, Table):
                module.to(dtype if self.config.stream == "bf16" else torch.float32)
            elif isinstance(module, Norm):
                module.dtype = dtype
        return self

    def roles(self) -> dict[str, Role]:
        return roles_of(self, named(self.custom))

    def named_roles(self) -> list[tuple[str, nn.Parameter, Role]]:
        """Every parameter as the optimizer takes it: name, tensor, role."""
        roles = self.roles()
        return [(name, parameter, roles[name]) for name, parameter in self.named_parameters()]
