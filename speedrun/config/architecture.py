"""The sections of the schema that say what is trained: the model, and what its attention sees."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from speedrun.config.fields import (
    Amount,
    Count,
    NonNegative,
    Positive,
    Section,
    Technique,
    refuse,
)

BLOCK = 128  # tokens in an attention block, the step of a window counted in blocks
TOKEN_UNIT = 64  # the step of a window counted in tokens

Layers = Annotated[tuple[Amount, ...], Field(strict=False)]
# Sizes that no run comes near; a model of all of them can still be counted in 64 bits.
Depth = Annotated[int, Field(ge=1, le=1000)]
Width = Annotated[int, Field(ge=1, le=2**20)]
Heads = Annotated[int, Field(ge=1, le=2**14)]
HeadSize = Annotated[int, Field(ge=0, le=2**14)]
Ratio = Annotated[int, Field(ge=1, le=1024)]
Rows = Annotated[int, Field(ge=0, le=2**31)]


class ModelConfig(Section):
    """Architecture: sizes come from the track, switches from the recipe."""

    layers: Depth = Field(12, description="transformer blocks")
    width: Width = Field(768, description="size of the residual stream")
    heads: Heads = Field(6, description="query heads; must divide the width unless head_dim is set")
    head_dim: HeadSize = Field(0, description="size of a head; 0: width / heads")
    kv_heads: Amount = Field(0, description="key/value heads, a divisor of heads; 0: as many")
    mlp_ratio: Ratio = Field(4, description="hidden size of the MLP in widths")
    bias: bool = Field(False, description="biases in linear layers and LayerNorm")
    positions: Annotated[
        Literal["rotary", "half-rotary", "learned"],
        Technique(
            "half-truncated rotary",
            off="rotary",
            on="half-rotary",
            also={"model.key_offset": False},
        ),
    ] = Field(
        "rotary",
        description="how a token knows its place; half-rotary: half the coordinates turn, with "
        "1024-range frequencies",
    )
    norm: Literal["rms", "layer"] = Field(
        "rms", description="kind of norm: rms has no gain, layer has"
    )
    norm_eps: Positive = Field(1e-6, description="added to the mean square inside every norm")
    activation: Annotated[Literal["relu2", "gelu"], Technique("ReLU squared", off="gelu")] = Field(
        "relu2", description="non-linearity of the MLP"
    )
    qk_norm: Annotated[bool, Technique("QK-norm", off=False)] = Field(
        True, description="RMS-normalise queries and keys before positions"
    )
    fused_qkv: bool = Field(False, description="one matrix for q, k and v")
    attention_scale: NonNegative = Field(0.0, description="softmax scale; 0: 1/sqrt(head_dim)")
    attention_output_factor: Literal["one", "depth"] = Field(
        "one", description="factor on the attention branch; depth: 1/sqrt(2 layers)"
    )
    attention_free: Annotated[Layers, Technique("layer without attention", off=[])] = Field(
        (), description="indices of layers without attention"
    )
    embedding_norm: Annotated[bool, Technique("embedding norm", off=False)] = Field(
        True, description="RMS-normalise the token embedding"
    )
    tied_head: Annotated[bool, Technique("untied head", off=True)] = Field(
        False, description="the head is the token embedding"
    )
    vocab_multiple: Count = Field(
        128, le=2**20, description="pad the head's vocabulary to a multiple"
    )
    pad_embeddings: bool = Field(True, description="pad the embedding tables likewise")
    init: Literal["uniform", "gpt2"] = Field(
        "uniform", description="initial weights; uniform: +-1/sqrt(fan in), gpt2: normal, 0.02"
    )
    zero_init_projections: Annotated[bool, Technique("zero-initialised projections", off=False)] = (
        Field(True, description="attention and MLP outputs start at 0")
    )
    zero_init_head: bool = Field(
        True, description="an untied head starts at 0, so the loss at ln V"
    )
    x0_mixing: Annotated[bool, Technique("x0 mixing", off=False)] = Field(
        False, description="each block mixes the stream with the embedding"
    )
    value_residual: Annotated[bool, Technique("value residual", off=False)] = Field(
        False, description="mix each layer's values with layer 0's"
    )
    value_embeddings: Annotated[
        Literal["none", "each", "mirrored", "ends"], Technique("value embeddings", off="none")
    ] = Field(
        "none", description="token tables added to values: one a layer, mirrored, or at the ends"
    )
    value_tables: Count = Field(
        3, description="tables of the 'ends' form, for first and last layers"
    )
    value_weights: Annotated[
        Literal["blend", "pair"], Technique("pair of value weights", off="blend")
    ] = Field(
        "blend",
        description="how values take them up; blend: (1-l) v + l e, pair: two learnt weights",
    )
    unet_skips: Annotated[bool, Technique("U-net skips", off=False)] = Field(
        False, description="add first-half outputs to the second half"
    )
    bigram_rows: Annotated[Rows, Technique("bigram table", off=0)] = Field(
        0, description="rows of a hashed table for pairs of neighbouring tokens; 0: none"
    )
    key_offset: Annotated[bool, Technique("key offset", off=False)] = Field(
        False, description="the half of a key that does not turn comes from the token before"
    )
    softcap: Annotated[NonNegative, Technique("softcap", off=0.0)] = Field(
        0.0, description="logits are c tanh(z/c); 0: no cap"
    )
    stream: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="numbers of tables and of what goes from layer to layer on a machine that "
        "multiplies in bf16; one that multiplies in fp32 has fp32 here, too",
    )

    @property
    def size_of_head(self) -> int:
        return self.head_dim or self.width // self.heads

    @property
    def groups(self) -> int:
        return self.kv_heads or self.heads

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if not self.head_dim and self.width % self.heads:
            allowed = f"it must divide model.width = {self.width} (or set model.head_dim)"
            refuse("model.heads", self.heads, allowed)
        if self.heads % self.groups:
            refuse("model.kv_heads", self.kv_heads, f"it must divide model.heads = {self.heads}")
        parts = {"rotary": 2, "half-rotary": 4, "learned": 1}[self.positions]
        if self.size_of_head % parts:
            head = f"width / heads is {self.size_of_head}"
            allowed = f"it needs a head size divisible by {parts}, and {head}"
            refuse("model.positions", self.positions, allowed)
        if self.key_offset and self.positions != "half-rotary":
            refuse("model.key_offset", True, "it needs model.positions = 'half-rotary'")
        if self.bigram_rows == 1:
            refuse("model.bigram_rows", 1, "one row is for tokens with none before: 0, 2 or more")
        if self.value_residual and 0 in self.attention_free:
            refuse(
                "model.value_residual",
                True,
                "layer 0 gives the values: take 0 out of model.attention_free",
            )
        if max(self.attention_free, default=0) >= self.layers:
            free = list(self.attention_free)
            refuse("model.attention_free", free, f"layers are numbered 0 to {self.layers - 1}")
        if self.value_residual and self.value_embeddings != "none":
            allowed = "they replace the value residual: set model.value_residual = false"
            refuse("model.value_embeddings", self.value_embeddings, allowed)
        if self.value_embeddings == "ends" and 2 * self.value_tables > self.layers:
            most = self.layers // 2
            allowed = f"first and last layers would overlap in {self.layers} layers: at most {most}"
            refuse("model.value_tables", self.value_tables, allowed)
        if self.unet_skips and self.layers % 2:
            refuse(
                "model.unet_skips",
                True,
                f"it needs an even number of model.layers, not {self.layers}",
            )
        return self


class AttentionConfig(Section):
    """The attention mask: documents and a sliding window."""

    documents: Annotated[bool, Technique("document mask", off=False)] = Field(
        False, description="attention stays inside a document"
    )
    window: Annotated[
        Literal["none", "tokens", "tokens_in_blocks", "blocks"],
        Technique(
            "window",
            off="none",
            also={"attention.window_start": 0, "attention.window_end": 0, "validation.window": 0},
        ),
    ] = Field("none", description="sliding window counted in tokens, in blocks of 128, or by both")
    window_start: Amount = Field(
        0, description="tokens a window has at step 0, in whole units (64 or 128)"
    )
    window_end: Amount = Field(0, description="tokens it has at the last step, likewise")

    @model_validator(mode="after")
    def _check(self) -> AttentionConfig:
        if self.window == "none":
            for key in ("window_start", "window_end"):
                if getattr(self, key):
                    allowed = "set attention.window to 'tokens' or 'blocks' first"
                    refuse(f"attention.{key}", getattr(self, key), allowed)
            return self
        if self.window_start < 1:
            refuse("attention.window_start", self.window_start, "a window has at least 1 token")
        if self.window_start > self.window_end:
            allowed = f"the window grows, so it is at most attention.window_end = {self.window_end}"
            refuse("attention.window_start", self.window_start, allowed)
        return self
