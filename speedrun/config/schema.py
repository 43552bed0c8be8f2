"""Every value a run depends on, as one frozen, validated object.

A recipe says how to train, a track says what is raced; both are TOML files that set keys of this
schema and nothing else. Each field's description is its documentation: `--dry-run` and error
messages print it. Step counts are written for a schedule of `schedule.steps` steps and scale with
the run's own length, so `--steps` shortens a recipe without bending its shape.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from speedrun.errors import ConfigError

BLOCK = 128  # tokens in an attention block, the step of a window counted in blocks
TOKEN_UNIT = 64  # the step of a window counted in tokens

Count = Annotated[int, Field(ge=1)]
Amount = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Fraction, Fraction], Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]
Layers = Annotated[tuple[Amount, ...], Field(strict=False)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _refuse(key: str, value: object, allowed: str) -> None:
    raise ConfigError(f"{key} = {value!r} cannot be used: {allowed}")


class ModelConfig(Section):
    """Architecture: sizes come from the track, switches from the recipe."""

    layers: Count = Field(12, description="transformer blocks")
    width: Count = Field(768, description="size of the residual stream")
    heads: Count = Field(6, description="query heads; must divide the width unless head_dim is set")
    head_dim: Amount = Field(0, description="size of a head; 0: width / heads")
    kv_heads: Amount = Field(0, description="key/value heads, a divisor of heads; 0: as many")
    mlp_ratio: Count = Field(4, description="hidden size of the MLP in widths")
    bias: bool = Field(False, description="biases in linear layers and LayerNorm")
    positions: Literal["rotary", "half-rotary", "learned"] = Field(
        "rotary", description="half-rotary: half the coordinates, 1024-range frequencies"
    )
    norm: Literal["rms", "layer"] = Field("rms", description="rms has no gain; layer has")
    norm_eps: Positive = Field(1e-6, description="added to the mean square inside every norm")
    activation: Literal["relu2", "gelu"] = Field("relu2", description="MLP non-linearity")
    qk_norm: bool = Field(True, description="RMS-normalise queries and keys before positions")
    fused_qkv: bool = Field(False, description="one matrix for q, k and v")
    attention_scale: NonNegative = Field(0.0, description="softmax scale; 0: 1/sqrt(head_dim)")
    attention_output_factor: Literal["one", "depth"] = Field(
        "one", description="factor on the attention branch; depth: 1/sqrt(2 layers)"
    )
    attention_free: Layers = Field((), description="indices of layers without attention")
    embedding_norm: bool = Field(True, description="RMS-normalise the token embedding")
    tied_head: bool = Field(False, description="the head is the token embedding")
    vocab_multiple: Count = Field(128, description="pad the head's vocabulary to a multiple")
    pad_embeddings: bool = Field(True, description="pad the embedding tables likewise")
    init: Literal["uniform", "gpt2"] = Field(
        "uniform", description="uniform: +-1/sqrt(fan in); gpt2: normal, 0.02"
    )
    zero_init_projections: bool = Field(True, description="attention and MLP outputs start at 0")
    zero_init_head: bool = Field(True, description="an untied head starts at 0: loss ln V")
    x0_mixing: bool = Field(False, description="each block mixes the stream with the embedding")
    value_residual: bool = Field(False, description="mix each layer's values with layer 0's")
    value_embeddings: Literal["none", "each", "mirrored", "ends"] = Field(
        "none", description="token tables added to values: one a layer, mirrored, or at the ends"
    )
    value_tables: Count = Field(3, description="tables of the 'ends' form: first and last layers")
    value_weights: Literal["blend", "pair"] = Field(
        "blend", description="blend: (1-l) v + l e; pair: two learnt weights"
    )
    unet_skips: bool = Field(False, description="add first-half outputs to the second half")
    bigram_rows: Amount = Field(
        0, description="rows of a hashed table for pairs of neighbouring tokens; 0: none"
    )
    key_offset: bool = Field(
        False, description="the half of a key that does not turn comes from the token before"
    )
    softcap: NonNegative = Field(0.0, description="logits are c tanh(z/c); 0: no cap")

    @property
    def size_of_head(self) -> int:
        return self.head_dim or self.width // self.heads

    @property
    def groups(self) -> int:
        return self.kv_heads or self.heads

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if not self.head_dim and self.width % self.heads:
            _refuse(
                "model.heads",
                self.heads,
                f"it must divide model.width = {self.width} (or set model.head_dim)",
            )
        if self.heads % self.groups:
            _refuse("model.kv_heads", self.kv_heads, f"it must divide model.heads = {self.heads}")
        parts = {"rotary": 2, "half-rotary": 4, "learned": 1}[self.positions]
        if self.size_of_head % parts:
            _refuse(
                "model.positions",
                self.positions,
                f"it needs a head size divisible by {parts}, and width / heads is "
                f"{self.size_of_head}",
            )
        if self.key_offset and self.positions != "half-rotary":
            _refuse("model.key_offset", True, "it needs model.positions = 'half-rotary'")
        if self.bigram_rows == 1:
            _refuse("model.bigram_rows", 1, "one row is for tokens with none before: 0, 2 or more")
        if self.value_residual and 0 in self.attention_free:
            _refuse("model.value_residual", True, "layer 0, which gives the values, must attend")
        for index in self.attention_free:
            if index >= self.layers:
                _refuse(
                    "model.attention_free",
                    list(self.attention_free),
                    f"layers are numbered 0 to {self.layers - 1}",
                )
        if self.value_residual and self.value_embeddings != "none":
            _refuse(
                "model.value_embeddings",
                self.value_embeddings,
                "they replace the value residual: set model.value_residual = false",
            )
        if self.value_embeddings == "ends" and 2 * self.value_tables > self.layers:
            _refuse(
                "model.value_tables",
                self.value_tables,
                f"first and last layers would overlap in {self.layers} layers",
            )
        if self.unet_skips and self.layers % 2:
            _refuse("model.unet_skips", True, f"layers must be even, not {self.layers}")
        return self


class AttentionConfig(Section):
    """Who sees whom, and which code computes it."""

    documents: bool = Field(False, description="attention stays inside a document")
    window: Literal["none", "tokens", "tokens_in_blocks", "blocks"] = Field(
        "none", description="sliding window counted in tokens, in blocks of 128, or by both"
    )
    window_start: Amount = Field(0, description="tokens at step 0, in whole units (64 or 128)")
    window_end: Amount = Field(0, description="tokens at the last step, likewise")
    backend: Literal["auto", "flex", "blocks", "dense"] = Field(
        "auto", description="auto: flex on CUDA, blocks on CPU"
    )

    @model_validator(mode="after")
    def _check(self) -> AttentionConfig:
        if self.window == "none":
            for key in ("window_start", "window_end"):
                if getattr(self, key):
                    _refuse(
                        f"attention.{key}",
                        getattr(self, key),
                        "set attention.window to 'tokens' or 'blocks' first",
                    )
            return self
        if self.window_start < 1:
            _refuse("attention.window_start", self.window_start, "a window has at least 1 token")
        if self.window_start > self.window_end:
            _refuse(
                "attention.window_start",
                self.window_start,
                f"the window grows, so it is at most attention.window_end = {self.window_end}",
            )
        return self


class AdamRule(Section):
    """Adam with decoupled weight decay for one role of parameter."""

    lr: Positive = Field(0.001, description="peak learning rate")
    betas: Betas = Field((0.9, 0.95), description="decay of the two moments")
    eps: Positive = Field(1e-8, description="added to the root of the second moment")
    weight_decay: NonNegative = Field(0.0, description="decoupled, times the learning rate")


class MuonRule(Section):
    """Muon for the hidden matrices."""

    lr: Positive = Field(0.02, description="peak learning rate")
    momentum: Fraction = Field(0.95, description="weight of the past, after its warm-up")
    momentum_start: Fraction = Field(0.95, description="weight of the past at step 0")
    nesterov: bool = Field(True, description="look one step ahead")
    weight_decay: NonNegative = Field(0.0, description="decoupled, times the learning rate")
    scale: Literal["spectral", "longest", "rms", "none"] = Field(
        "spectral",
        description="factor on the update: sqrt(max(1, rows/cols)), sqrt(longest), 0.2 of that",
    )
    coefficients: Literal["classic", "polar_express"] = Field(
        "classic", description="polynomials of the orthogonalisation"
    )
    iterations: Count = Field(5, description="rounds of the orthogonalisation")
    split_qkv: bool = Field(False, description="orthogonalise q, k and v of a fused matrix apart")


class OptimizerConfig(Section):
    """One rule for each role a parameter plays in the model."""

    kind: Literal["adamw", "muon"] = Field(
        "adamw", description="hidden matrices follow optimizer.hidden or optimizer.muon"
    )
    clip: NonNegative = Field(0.0, description="largest norm of the whole gradient; 0: no limit")
    muon: MuonRule = Field(MuonRule(), description="matrices inside the blocks, kind = muon")
    hidden: AdamRule = Field(AdamRule(), description="matrices inside the blocks, kind = adamw")
    embedding: AdamRule = Field(AdamRule(), description="token table (if not tied), positions")
    value_embedding: AdamRule = Field(AdamRule(), description="value embedding tables")
    bigram: AdamRule = Field(AdamRule(), description="the table of token pairs")
    head: AdamRule = Field(AdamRule(), description="the head, tied or not")
    scalar: AdamRule = Field(AdamRule(), description="gains, biases, mixing and skip weights")


class ScheduleConfig(Section):
    """Multipliers over a run, in steps of a run of `steps`; other lengths scale them."""

    steps: Count = Field(1000, description="length the counts below are written for")
    shape: Literal["trapezoid", "cosine"] = Field("trapezoid", description="learning rate")
    warmup: Amount = Field(0, description="steps of linear warm-up")
    cooldown: Amount = Field(400, description="steps of linear decay at the end (trapezoid)")
    floor: Fraction = Field(0.0, description="least multiplier")
    momentum_warmup: Amount = Field(0, description="steps in which Muon's momentum grows")

    @model_validator(mode="after")
    def _check(self) -> ScheduleConfig:
        if self.warmup + self.cooldown > self.steps:
            _refuse(
                "schedule.cooldown",
                self.cooldown,
                f"with schedule.warmup = {self.warmup} it must fit schedule.steps = {self.steps}",
            )
        return self


class DataConfig(Section):
    """Where tokens come from."""

    sources: Names = Field(("stdlib",), description="corpus: stdlib, files, folders, hf:NAME")
    tokenizer: str = Field("bpe:4096", description="byte, bpe:N or gpt2")
    dir: str = Field("", description="a built dataset; replaces sources and tokenizer")
    val_fraction: Fraction = Field(0.05, description="share of documents kept for validation")
    order: Literal["sequential", "shuffled"] = Field(
        "shuffled", description="sequential: the records' order, whatever the seed"
    )


class BatchConfig(Section):
    """The global batch of one optimizer step."""

    tokens: Count = Field(524_288, description="tokens per step over all ranks")
    length: Count = Field(1024, description="tokens in a sequence")
    microbatch: Amount = Field(0, description="sequences per forward pass; 0: what memory holds")

    @model_validator(mode="after")
    def _check(self) -> BatchConfig:
        if self.tokens % self.length:
            _refuse(
                "batch.tokens",
                self.tokens,
                f"it must be a multiple of batch.length = {self.length}",
            )
        return self


class ValidationConfig(Section):
    tokens: Count = Field(10_485_760, description="first tokens of the validation split")
    every: Count = Field(125, description="steps between validations; the last step always")
    window: Amount = Field(
        0, description="tokens seen in validation, rounded up to blocks, if wider than in training"
    )


class TrainConfig(Section):
    steps: Amount = Field(0, description="optimizer steps; 0: schedule.steps")
    seed: Amount = Field(0, description="initial weights and order of the data")
    target: NonNegative = Field(0.0, description="validation loss that ends the race; 0: none")
    stop: Literal["steps", "target"] = Field(
        "steps", description="end after all steps, or at the first validation at the target"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda if present")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="of activations and tables; matrices stay fp32; auto: bf16 on CUDA"
    )
    compile: Literal["auto", "none", "block", "model"] = Field(
        "auto", description="torch.compile a block, reused by all, or the model; auto: on CUDA"
    )
    threads: Amount = Field(0, description="CPU threads; 0: all cores")


class Config(Section):
    """One resolved run."""

    recipe: str = Field("", description="name of the recipe")
    track: str = Field("", description="name of the track")
    model: ModelConfig = ModelConfig()
    attention: AttentionConfig = AttentionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    validation: ValidationConfig = ValidationConfig()
    train: TrainConfig = TrainConfig()

    @property
    def steps(self) -> int:
        return self.train.steps or self.schedule.steps

    def scaled(self, steps: int) -> int:
        """A step count of the schedule, mapped to this run's length."""
        return round(steps * self.steps / self.schedule.steps)

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.attention.window_end > self.batch.length:
            _refuse(
                "attention.window_end",
                self.attention.window_end,
                f"a window is at most the sequence, batch.length = {self.batch.length}",
            )
        if self.validation.window and self.attention.window == "none":
            _refuse("validation.window", self.validation.window, "training has no window to widen")
        if self.validation.window > self.batch.length:
            _refuse(
                "validation.window",
                self.validation.window,
                f"a window is at most the sequence, batch.length = {self.batch.length}",
            )
        if self.validation.tokens % self.batch.length:
            _refuse(
                "validation.tokens",
                self.validation.tokens,
                f"it must be a multiple of batch.length = {self.batch.length}",
            )
        return self

    def microbatches(self, world: int = 1, fits: int = 0) -> int:
        """Forward passes per step on each rank; refuses what cannot be divided.

        Where the config leaves it open, a pass takes as many sequences as `fits` (0: any number).
        """
        sequences = self.batch.tokens // self.batch.length
        if sequences % world:
            _refuse(
                "batch.tokens",
                self.batch.tokens,
                f"its {sequences} sequences must divide by the {world} ranks",
            )
        share = sequences // world
        most = min(fits or share, share)
        largest = next(n for n in range(most, 0, -1) if share % n == 0)
        micro = self.batch.microbatch or largest
        if share % micro:
            _refuse(
                "batch.microbatch",
                micro,
                f"it must divide a rank's {share} sequences per step "
                f"(batch.tokens / batch.length / {world} ranks)",
            )
        return share // micro
