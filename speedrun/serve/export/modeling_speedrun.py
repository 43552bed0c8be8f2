"""A GPT that Speedrun trained, for transformers: AutoModelForCausalLM with trust_remote_code=True.

The whole model is in this file. It computes what Speedrun computes, switch by switch; names of
weights are those of Speedrun's checkpoints. What a token sees follows from the token ids alone:

    documents   an end-of-text token opens a document, and attention may stay inside of one
    window      a query sees keys back to the edge of a window of tokens or blocks of 128
    pairs       a table of neighbouring tokens, and keys of which half come from the token before

So the cache must know the ids of the past. They travel inside of it, as two more channels of the
first layer's keys, and nothing is remembered anywhere else: beams may be reordered, batches chosen
from, tokens cropped. Padding is known by the attention mask; positions count the other tokens.

Legend: B rows, T new tokens, K all tokens with the past, D width, H query heads, G key/value heads,
C channels of a head, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

BLOCK = 128  # tokens in a block of a window

SWITCHES: dict[str, Any] = {
    "vocab_size": 50304,  # rows of the head; ids from `tokens` on are padding that is never written
    "tokens": 50257,  # ids that the tokenizer has
    "table_rows": 50304,  # rows of the embedding and of the value tables
    "end_of_text": 50256,  # the id that opens a document
    "length": 1024,  # tokens in a row of training
    "layers": 12,
    "width": 768,
    "heads": 6,
    "kv_heads": 6,
    "head_dim": 128,
    "mlp_width": 3072,
    "bias": False,  # in linear layers and LayerNorm
    "positions": "rotary",  # rotary, half-rotary, learned
    "norm": "rms",  # rms without gain, layer with
    "norm_eps": 1e-6,
    "activation": "relu2",  # relu2, gelu
    "qk_norm": True,  # queries and keys are normed before they are rotated
    "fused_qkv": False,  # one matrix for queries, keys and values
    "attention_scale": 128**-0.5,  # of the softmax
    "attention_output_factor": 1.0,  # of the whole branch
    "attention_free": [],  # layers without attention
    "embedding_norm": True,
    "tie_word_embeddings": False,  # the head is the embedding
    "x0_mixing": False,  # each block mixes the stream with the embedding
    "value_residual": False,  # each layer's values are mixed with layer 0's
    "value_tables": [],  # for each layer the value table that its values are mixed with, or null
    "value_weights": 0,  # learnt weights of that mixing: 0 (none), 1 or 2
    "unet_skips": False,  # outputs of the first half are added in the second
    "bigram_rows": 0,  # of the table for pairs of tokens; 0: none
    "key_offset": False,  # the half of a key that is not rotated comes from the token before
    "softcap": 0.0,  # logits are c tanh(z / c); 0: no cap
    "documents": False,  # attention stays inside of a document
    "window_unit": "none",  # none, tokens, blocks, tokens_in_blocks (both)
    "window": None,
}


class SpeedrunConfig(PretrainedConfig):
    """Sizes and switches under Speedrun's own names; transformers' names mean the same."""

    model_type = "speedrun"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "intermediate_size": "mlp_width",
        "max_position_embeddings": "length",
    }

    def __init__(self, **values: Any) -> None:
        for name, default in SWITCHES.items():
            setattr(self, name, values.pop(name, default))
        super().__init__(tie_word_embeddings=self.tie_word_embeddings, **values)


@dataclass
class Context:
    """Where the new tokens stand and what they see."""

    position: Tensor  # (B, T)
    before: Tensor  # (B, T): the id before each, -1 for the first of its document
    previous: Tensor  # (B, K): the column of the token before, its own for the first of a document
    mask: Tensor  # (B, 1, T, K): who sees whom
    digits: Tensor  # (B, T, 2): what the cache keeps of the ids


def context_of(
    config: SpeedrunConfig, ids_BK: Tensor, real_BK: Tensor, visible_BK: Tensor, new: int
) -> Context:
    """`real`: what is no padding; `visible`: what the caller lets be seen of it."""
    column_K = torch.arange(ids_BK.size(1), device=ids_BK.device)
    position_BK = (real_BK.cumsum(1) - 1).clamp(min=0)
    opens_BK = real_BK & (ids_BK == config.end_of_text) & bool(config.documents)
    last_real_BK = torch.where(real_BK, column_K, -1).cummax(1).values
    previous_BK = F.pad(last_real_BK[:, :-1], (1, 0), value=-1)
    first_BK = opens_BK | (previous_BK < 0)
    previous_BK = torch.where(first_BK, column_K, previous_BK)
    before_BK = ids_BK.gather(1, previous_BK).masked_fill(first_BK, -1)

    document_BK, query_T1 = opens_BK.cumsum(1), column_K[-new:, None]
    sees = visible_BK[:, None] & (column_K <= query_T1)
    sees = sees & (document_BK[:, -new:, None] == document_BK[:, None])
    q_BT1, k_B1K, unit = position_BK[:, -new:, None], position_BK[:, None], config.window_unit
    if unit in ("tokens", "tokens_in_blocks"):
        sees = sees & (q_BT1 - k_B1K < config.window)
    if unit in ("blocks", "tokens_in_blocks"):
        blocks = config.window if unit == "blocks" else -(-config.window // BLOCK)
        sees = sees & (q_BT1 // BLOCK - k_B1K // BLOCK < blocks)
    sees = sees | (column_K == query_T1)  # padding sees itself: a softmax needs something
    # Two digits of base 256 are exact in every type of float; padding has the digit -1.
    digits = torch.stack([ids_BK // 256, ids_BK % 256], dim=-1)
    digits = digits.masked_fill(~real_BK[..., None], -1)[:, -new:]
    return Context(position_BK[:, -new:], before_BK[:, -new:], previous_BK, sees[:, None], digits)


def ids_in(cache: Any) -> tuple[Tensor, Tensor]:
    """The ids of the past, and which of them are no padding."""
    high, low = cache.layers[0].keys[:, 0, :, -2:].long().unbind(-1)
    return (256 * high + low).clamp(min=0), high >= 0


def angles_at(config: SpeedrunConfig, position_BT: Tensor) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines of the pairs (i, i + C/2), in fp32 whatever the model is in."""
    if config.positions == "learned":
        return None
    C, device = config.head_dim, position_BT.device
    if config.positions == "half-rotary":  # the second half of the pairs is not rotated
        exponents = torch.linspace(0, 1, C // 4, dtype=torch.float32, device=device)
        frequencies = torch.cat([1024.0**-exponents, torch.zeros(C // 4, device=device)])
    else:
        exponents = torch.arange(0, C, 2, dtype=torch.float32, device=device) / C
        frequencies = 10000.0**-exponents
    angles_BT1C = (position_BT.float()[..., None] * frequencies)[:, :, None]
    return angles_BT1C.cos(), angles_BT1C.sin()


def rms_norm(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=eps)


class Norm(nn.Module):
    """RMSNorm without gain, or LayerNorm with gain and perhaps bias."""

    def __init__(self, config: SpeedrunConfig) -> None:
        super().__init__()
        self.eps, layer = config.norm_eps, config.norm == "layer"
        self.gain = nn.Parameter(torch.ones(config.width)) if layer else None
        self.bias = nn.Parameter(torch.zeros(config.width)) if layer and config.bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.gain is None:
            return rms_norm(x, self.eps)
        return F.layer_norm(x, x.shape[-1:], self.gain, self.bias, self.eps)


class Attention(nn.Module):
    """`index` counts the layers that attend: it is their place in the cache."""

    def __init__(self, config: SpeedrunConfig, index: int) -> None:
        super().__init__()
        self.config, self.index, C = config, index, config.head_dim
        self.sizes = [config.heads * C, config.kv_heads * C, config.kv_heads * C]
        outputs = [sum(self.sizes)] if config.fused_qkv else self.sizes
        self.qkv = nn.ModuleList(nn.Linear(config.width, n, bias=config.bias) for n in outputs)
        self.output = nn.Linear(self.sizes[0], config.width, bias=config.bias)
        weights = config.value_weights
        self.blend = nn.Parameter(torch.full((weights,), 0.5)) if weights else None

    def forward(
        self,
        x_BTD: Tensor,
        value_input: Tensor | None,
        angles: tuple[Tensor, Tensor] | None,
        context: Context,
        cache: Any,
    ) -> tuple[Tensor, Tensor]:
        """What is added to the stream, and the layer's own values before mixing."""
        B, T, C = *x_BTD.shape[:2], self.config.head_dim
        parts = [linear(x_BTD) for linear in self.qkv]
        if self.config.fused_qkv:
            parts = list(parts[0].split(self.sizes, dim=-1))
        q, k, own_values = (part.view(B, T, -1, C) for part in parts)
        if self.config.qk_norm:
            q, k = rms_norm(q, self.config.norm_eps), rms_norm(k, self.config.norm_eps)
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        v = self.mix(own_values, value_input)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            if self.index == 0:
                digits = context.digits.to(k.dtype)[:, None].expand(-1, k.size(1), -1, -1)
                k = torch.cat([k, digits], dim=-1)
            k, v = cache.update(k, v, self.index)
            k = k[..., :C]
        if self.config.key_offset:
            k = offset_keys(k, context.previous)
        how = {"scale": self.config.attention_scale, "enable_gqa": q.size(1) > k.size(1)}
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=context.mask, **how)
        y = self.output(y.transpose(1, 2).reshape(B, T, -1))
        return self.config.attention_output_factor * y, own_values

    def mix(self, v: Tensor, value_input: Tensor | None) -> Tensor:
        """v with a value table's rows or layer 0's values, by one learnt weight or two."""
        if self.blend is None:
            return v
        if value_input is None and self.config.value_residual:
            value_input = v  # layer 0
        input_weight = self.blend[-1]
        own_weight = self.blend[0] if len(self.blend) == 2 else 1 - input_weight
        if value_input is None:
            return own_weight * v
        return own_weight * v + input_weight * value_input.view_as(v)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1).type_as(x)


def offset_keys(k_BGKC: Tensor, previous_BK: Tensor) -> Tensor:
    """The quarters of each key that are not rotated, from the token before it."""
    index = previous_BK[:, None, :, None].expand_as(k_BGKC)
    own, previous = k_BGKC.chunk(4, dim=-1), k_BGKC.gather(2, index).chunk(4, dim=-1)
    return torch.cat([own[0], previous[1], own[2], previous[3]], dim=-1)


class MLP(nn.Module):
    def __init__(self, config: SpeedrunConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.mlp_width, bias=config.bias)
        self.down = nn.Linear(config.mlp_width, config.width, bias=config.bias)
        self.gelu = config.activation == "gelu"

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(F.gelu(h) if self.gelu else F.relu(h).square())


class Block(nn.Module):
    """Mix in the embedding, then attention, if the layer has it, then the MLP."""

    def __init__(self, config: SpeedrunConfig, layer: int) -> None:
        super().__init__()
        attends = layer not in config.attention_free
        index = sum(earlier not in config.attention_free for earlier in range(layer))
        self.attention = Attention(config, index) if attends else None
        self.mlp = MLP(config)
        self.norm1 = Norm(config) if attends else None
        self.norm2 = Norm(config)
        self.mix = nn.Parameter(torch.tensor([1.0, 0.0])) if config.x0_mixing else None

    def forward(
        self, x: Tensor, x0: Tensor, value_input: Tensor | None, *seen: Any
    ) -> tuple[Tensor, Tensor | None]:
        values = None
        if self.mix is not None:
            x = self.mix[0] * x + self.mix[1] * x0
        if self.attention is not None and self.norm1 is not None:
            y, values = self.attention(self.norm1(x), value_input, *seen)
            x = x + y
        return x + self.mlp(self.norm2(x)), values


def row_of_pair(ids: Tensor, before: Tensor, rows: int) -> Tensor:
    """By a hash, so pairs may share one; the last row is for a token with none before it."""
    return torch.where(before < 0, rows - 1, (36313 * ids ^ 27191 * before) % (rows - 1))


class SpeedrunForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = SpeedrunConfig
    main_input_name = "input_ids"
    base_model_prefix = ""
    _supports_sdpa = True  # the only attention there is; "eager" runs it too
    _input_embed_layer = "embedding"

    def __init__(self, config: SpeedrunConfig) -> None:
        super().__init__(config)
        D, learned = config.width, config.positions == "learned"
        self.embedding = nn.Embedding(config.table_rows, D)
        pairs, values = config.bigram_rows, config.kv_heads * config.head_dim
        self.bigrams = nn.ModuleDict({"table": nn.Embedding(pairs, D)}) if pairs else None
        self.positions = nn.Embedding(config.length, D) if learned else None
        count = 1 + max((t for t in config.value_tables if t is not None), default=-1)
        tables = nn.ModuleList(nn.Embedding(config.table_rows, values) for _ in range(count))
        self.value_embeddings = nn.ModuleDict({"tables": tables})
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.skips = nn.Parameter(torch.ones(config.layers // 2)) if config.unet_skips else None
        self.norm = Norm(config)
        tied = config.tie_word_embeddings
        self.head = None if tied else nn.Linear(D, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        cache = past_key_values
        refuse(attention_mask, cache, kwargs)
        if cache is None and (not self.training if use_cache is None else use_cache):
            cache = DynamicCache()
        context = self.context(input_ids, attention_mask, cache)
        x = self.embed(input_ids, context)
        x0, hidden, angles = x, [x], angles_at(self.config, context.position)
        tables: Any = self.value_embeddings["tables"]
        rows = [table(input_ids) for table in tables]
        of_layer = self.config.value_tables or [None] * len(self.blocks)
        value_inputs = [None if t is None else rows[t] for t in of_layer]
        encoded: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            if self.skips is not None and layer >= len(self.skips):
                x = x + self.skips[layer - len(self.skips)] * encoded.pop()
            x, values = block(x, x0, value_inputs[layer], angles, context, cache)
            if self.skips is not None and layer < len(self.skips):
                encoded.append(x)
            if self.config.value_residual and layer == 0:
                value_inputs = [values] * len(self.blocks)
            hidden.append(x)
        if cache is not None and all(block.attention is None for block in self.blocks):
            digits = context.digits[:, None].to(x.dtype)
            cache.update(digits, digits, 0)  # no layer has keys that could take them along
        x = hidden[-1] = self.norm(x)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        head = self.embedding if self.head is None else self.head
        logits = F.linear(x[:, kept], head.weight)
        if cap := self.config.softcap:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states = tuple(hidden) if output_hidden_states else None
        output = CausalLMOutputWithPast(loss, logits, cache, states)
        return output.to_tuple() if return_dict is False else output

    def embed(self, ids_BT: Tensor, context: Context) -> Tensor:
        x = self.embedding(ids_BT)
        if self.positions is not None:
            if context.position.max() >= self.config.length:
                raise ValueError(f"there are {self.config.length} positions and none beyond")
            x = x + self.positions(context.position)
        if self.bigrams is not None:
            row_BT = row_of_pair(ids_BT, context.before, self.config.bigram_rows)
            x = x + self.bigrams["table"](row_BT)
        return rms_norm(x, self.config.norm_eps) if self.config.embedding_norm else x

    def context(self, ids_BT: Tensor, mask: Tensor | None, cache: Any) -> Context:
        """With the past, if the cache has one."""
        new, ids, real = ids_BT.size(1), ids_BT, torch.ones_like(ids_BT, dtype=torch.bool)
        if mask is not None:
            real = mask[:, -new:].to(real)
        if cache is not None and cache.get_seq_length():
            past, was_real = ids_in(cache)
            ids = torch.cat([past.to(ids), ids], dim=1)
            real = torch.cat([was_real.to(real), real], dim=1)
        visible = real
        if mask is not None and mask.size(1) == ids.size(1):
            visible = real & mask.to(real)
        elif mask is not None and mask.size(1) != new:
            raise ValueError(f"attention_mask has {mask.size(1)} tokens: give {ids.size(1)}")
        return context_of(self.config, ids, real, visible, new)


def refuse(mask: Tensor | None, cache: Any, others: dict[str, Any]) -> None:
    """Say what this model cannot do, rather than do something else."""
    if any(type(layer).__name__ != "DynamicLayer" for layer in getattr(cache, "layers", ())):
        raise ValueError("this model keeps ids in its cache, all of them: use a DynamicCache")
    if mask is not None and mask.dim() != 2:
        raise ValueError("attention_mask is (rows, tokens) here, 0 for padding: what else a token "
                         "sees follows from the ids")  # fmt: skip
    if others.pop("position_ids", None) is not None:
        raise ValueError("positions follow from attention_mask: leave position_ids out")
    if others.pop("output_attentions", None):
        raise ValueError("attention weights are not kept: leave output_attentions out")
