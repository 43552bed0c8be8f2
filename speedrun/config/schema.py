"""Every value a run depends on, as one frozen, validated object.

A recipe says how to train, a track says what is raced; both are TOML files that set keys of this
schema and nothing else. Each field's description is its documentation, which error messages
print. Step counts are written for a schedule of `schedule.steps` steps and scale with
the run's own length, so `--steps` shortens a recipe without bending its shape.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from speedrun.config.code import CustomConfig, UsedCode
from speedrun.config.fields import (
    Amount,
    Count,
    Fraction,
    NonNegative,
    Positive,
    Section,
    Seed,
    Technique,
    Text,
    refuse,
)
from speedrun.config.optimizer import ROLES, OptimizerConfig

BLOCK = 128  # tokens in an attention block, the step of a window counted in blocks
TOKEN_UNIT = 64  # the step of a window counted in tokens


def _as_list(value: Any) -> Any:
    """A name by itself is a list of one; what was meant as a list is not a name."""
    if not isinstance(value, str):
        return value
    if value.startswith("[") and value.endswith("]"):
        raise PydanticCustomError("names", """names in a list have quotes: '["a.txt", "b.txt"]'""")
    return [value] if value else []


Names = Annotated[tuple[Text, ...], Field(strict=False), BeforeValidator(_as_list)]
Layers = Annotated[tuple[Amount, ...], Field(strict=False)]
# Sizes that no run comes near; a model of all of them can still be counted in 64 bits.
Depth = Annotated[int, Field(ge=1, le=1000)]
Width = Annotated[int, Field(ge=1, le=2**20)]
Heads = Annotated[int, Field(ge=1, le=2**14)]
HeadSize = Annotated[int, Field(ge=0, le=2**14)]
Ratio = Annotated[int, Field(ge=1, le=1024)]
Rows = Annotated[int, Field(ge=0, le=2**31)]
Length = Annotated[int, Field(ge=1, le=2**24)]
Threads = Annotated[int, Field(ge=0, le=1024)]


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


class ScheduleConfig(Section):
    """Multipliers over a run, in steps of a run of `steps`; other lengths scale them."""

    steps: Count = Field(1000, description="length that counts of steps are written for")
    shape: Literal["trapezoid", "cosine"] = Field(
        "trapezoid", description="course of the learning rate: up, flat and down, or half a cosine"
    )
    warmup: Amount = Field(0, description="steps of linear warm-up")
    cooldown: Amount = Field(400, description="steps of linear decay at the end (trapezoid)")
    floor: Fraction = Field(0.0, description="least multiplier of the learning rate, at its end")
    momentum_warmup: Annotated[Amount, Technique("momentum warm-up", off=0)] = Field(
        0, description="steps in which Muon's momentum grows"
    )
    momentum_cooldown: Annotated[Amount, Technique("momentum cool-down", off=0)] = Field(
        0, description="steps at the end in which it falls back to optimizer.muon.momentum_start"
    )

    @model_validator(mode="after")
    def _check(self) -> ScheduleConfig:
        if self.warmup + self.cooldown > self.steps:
            refuse(
                "schedule.cooldown",
                self.cooldown,
                f"with schedule.warmup = {self.warmup} it must fit schedule.steps = {self.steps}",
            )
        return self


class DataConfig(Section):
    """Where tokens come from."""

    sources: Names = Field(
        ("stdlib",), description="corpus: stdlib, docstrings, files, folders, hf:NAME"
    )
    tokenizer: Text = Field(
        "bpe:4096", description="how text becomes tokens: byte, bpe:N (learnt) or gpt2"
    )
    dir: Text = Field("", description="a built dataset; replaces sources and tokenizer")
    val_fraction: Fraction = Field(0.05, description="share of documents kept for validation")
    test_fraction: Fraction = Field(0.05, description="share of documents kept for the test")
    order: Literal["sequential", "shuffled"] = Field(
        "shuffled",
        description="of training rows; sequential: the records' order, whatever the seed",
    )


class BatchConfig(Section):
    """The global batch of one optimizer step."""

    tokens: Count = Field(524_288, description="tokens per step over all ranks")
    length: Length = Field(1024, description="tokens in a sequence")

    @model_validator(mode="after")
    def _check(self) -> BatchConfig:
        if self.tokens % self.length:
            allowed = f"it must be a multiple of batch.length = {self.length}"
            refuse("batch.tokens", self.tokens, allowed)
        return self


class ValidationConfig(Section):
    """How often the model is measured, and on what."""

    tokens: Count = Field(10_485_760, description="tokens of the validation split")
    rows: Literal["spread", "first", "between", "last"] = Field(
        "spread",
        description="sequences taken: spread evenly over the split, or the first (the public "
        "rule); to tune on: those between the spread ones, or the last",
    )
    every: Count = Field(
        125, description="steps between validations, closer near the target; the last step always"
    )
    window: Amount = Field(
        0, description="tokens seen in validation, rounded up to blocks, if wider than in training"
    )


class TrainConfig(Section):
    """How long a run is, its seed, and where the race ends."""

    steps: Amount = Field(0, description="optimizer steps; 0: schedule.steps")
    seed: Seed = Field(0, description="initial weights and order of the data")
    target: NonNegative = Field(0.0, description="validation loss that ends the race; 0: none")
    stop: Literal["steps", "target"] = Field(
        "steps", description="end after all steps, or at the first validation at the target"
    )


class MachineConfig(Section):
    """What a run runs on. None of it is raced: results differ by rounding at most."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="what computes; auto: cuda if present"
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        description="numbers of activations and tables; matrices stay fp32; auto: bf16 on CUDA",
    )
    attention: Literal["auto", "flex", "blocks", "dense"] = Field(
        "auto", description="what computes attention; auto: flex on CUDA, blocks on CPU"
    )
    compile: Literal["auto", "none", "block", "model"] = Field(
        "auto", description="for torch.compile: a block, reused by all, or the model; auto: on CUDA"
    )
    microbatch: Amount = Field(0, description="sequences per forward pass; 0: what memory holds")
    threads: Threads = Field(
        0, description="CPU threads; 0: all cores, or OMP_NUM_THREADS where that is less"
    )
    jobs: Count = Field(
        1, description="runs that share the machine at a time, its cores and memory divided by them"
    )


# Keys that had another name. Stored configs are read under either, everything else is refused.
MOVED = {
    "train.device": "machine.device",
    "train.precision": "machine.precision",
    "train.compile": "machine.compile",
    "train.threads": "machine.threads",
    "attention.backend": "machine.attention",
    "batch.microbatch": "machine.microbatch",
}


class Config(Section):
    """One resolved run."""

    recipe: Text = Field("", description="name of the recipe")
    track: Text = Field("", description="name of the track")
    model: ModelConfig = ModelConfig()
    attention: AttentionConfig = AttentionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    custom: CustomConfig = CustomConfig()
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    validation: ValidationConfig = ValidationConfig()
    train: TrainConfig = TrainConfig()
    machine: MachineConfig = MachineConfig()

    @property
    def steps(self) -> int:
        return self.train.steps or self.schedule.steps

    @property
    def window_unit(self) -> int:
        """Tokens in one unit of the scheduled window."""
        return BLOCK if self.attention.window == "blocks" else 1

    def scaled(self, steps: int) -> int:
        """A step count of the schedule, mapped to this run's length."""
        return round(steps * self.steps / self.schedule.steps)

    @model_validator(mode="after")
    def _check(self) -> Config:
        training, validation, length = self.attention, self.validation, self.batch.length
        if validation.window and training.window == "none":
            refuse(
                "validation.window",
                validation.window,
                "training has no window to widen: set it to 0",
            )
        allowed = f"a window is at most the sequence, batch.length = {length}"
        if training.window_end > length:
            refuse("attention.window_end", training.window_end, allowed)
        if validation.window > length:
            refuse("validation.window", validation.window, allowed)
        if validation.tokens % length:
            allowed = f"it must be a multiple of batch.length = {length}"
            refuse("validation.tokens", validation.tokens, allowed)
        model = self.model
        self.optimizer.check_heads(model.heads, model.groups, fused=model.fused_qkv)
        return self

    def used_code(self) -> dict[str, UsedCode]:
        """All code of users' own that a run of this config uses, by table."""
        tables = {role: self.optimizer.table(role) for role in ROLES if self.optimizer.is_own(role)}
        found = {f"optimizer.{table}": getattr(self.optimizer, table) for table in tables.values()}
        parts = {f"custom.{part}": used for part, used in self.custom if used.use}
        return {**found, **parts}

    def microbatches(self, world: int = 1, fits: int = 0) -> int:
        """Forward passes per step on each rank; refuses what cannot be divided.

        Where the config leaves it open, a pass takes as many sequences as `fits` (0: any number).
        """
        sequences = self.batch.tokens // self.batch.length
        if sequences % world:
            allowed = f"its {sequences} sequences must divide by the {world} ranks"
            refuse("batch.tokens", self.batch.tokens, allowed)
        share = sequences // world
        most = min(fits or share, share)
        largest = next(n for n in range(most, 0, -1) if share % n == 0)
        micro = self.machine.microbatch or largest
        if share % micro:
            share_is = f"(batch.tokens / batch.length / {world} ranks)"
            allowed = f"it must divide a rank's {share} sequences per step {share_is}"
            refuse("machine.microbatch", micro, allowed)
        return share // micro
