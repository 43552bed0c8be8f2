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

from speedrun.config.architecture import BLOCK, AttentionConfig, ModelConfig
from speedrun.config.code import CustomConfig, UsedCode
from speedrun.config.fields import (
    Amount,
    Count,
    Fraction,
    NonNegative,
    Section,
    Seed,
    Technique,
    Text,
    refuse,
)
from speedrun.config.optimizer import ROLES, OptimizerConfig


def _as_list(value: Any) -> Any:
    """A name by itself is a list of one; what was meant as a list is not a name."""
    if not isinstance(value, str):
        return value
    if value.startswith("[") and value.endswith("]"):
        raise PydanticCustomError("names", """names in a list have quotes: '["a.txt", "b.txt"]'""")
    return [value] if value else []


Names = Annotated[tuple[Text, ...], Field(strict=False), BeforeValidator(_as_list)]
Length = Annotated[int, Field(ge=1, le=2**24)]
Threads = Annotated[int, Field(ge=0, le=1024)]
Prefetch = Annotated[int, Field(ge=0, le=64)]


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
    """What a run runs on, and how. Results differ by rounding at most, seconds may by much.

    The last seven are what records gained time by; switched off, they can be raced.
    """

    device: Literal["auto", "cpu", "cuda", "rehearsal"] = Field(
        "auto",
        description="what computes; auto: cuda if present; rehearsal: what a GPU would be given, "
        "on the CPU and slowly",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        description="numbers of products, and of the stream if model.stream is bf16; matrices stay "
        "fp32; auto: bf16 on CUDA",
    )
    attention: Literal["auto", "flex", "blocks", "dense"] = Field(
        "auto", description="what computes attention; auto: flex on CUDA, blocks on CPU"
    )
    compile: Literal["auto", "none", "block", "model"] = Field(
        "auto", description="for torch.compile: a block, reused by all, or the model; auto: on CUDA"
    )
    guards: Literal["auto", "all", "few"] = Field(
        "auto",
        description="what compiled code checks before every pass; few: only what tells training "
        "from validation, once both are compiled; auto: few on CUDA without code of one's own",
    )
    microbatch: Amount = Field(0, description="sequences per forward pass; 0: what memory holds")
    recompute: bool = Field(
        False,
        description="what a block keeps for its backward pass is computed again there: a fraction "
        "of the memory for one more forward pass of time; the same bits in as many passes",
    )
    threads: Threads = Field(
        0, description="CPU threads; 0: all cores, or OMP_NUM_THREADS where that is less"
    )
    jobs: Count = Field(
        1, description="runs that share the machine at a time, its cores and memory divided by them"
    )
    share_gradients: bool = Field(
        True,
        description="ranks get the gradients of what they update; off: every rank gets all of "
        "them, which sends twice as much",
    )
    bucket_views: bool = Field(
        True, description="ranks send gradients from where the backward puts them; off: a copy"
    )
    overlap_gathers: bool = Field(
        True,
        description="Muon's updates travel between ranks while the next are computed; off: each is "
        "waited for",
    )
    full_blocks: bool = Field(
        True,
        description="FlexAttention looks at pairs of tokens only in blocks that are seen in part; "
        "off: in all blocks",
    )
    pinned: bool = Field(
        True, description="batches lie in memory that a GPU copies from by itself; off: it waits"
    )
    prefetch: Prefetch = Field(
        2, description="batches made ahead, and a shard read ahead; 0: when they are asked for"
    )
    kernels: Literal["auto", "torch", "triton"] = Field(
        "auto",
        description="what computes loss, MLP, Muon's squares and steps of bf16 tables on a GPU: "
        "kernels in Triton, or torch's; auto: triton on CUDA where it is installed",
    )

    @property
    def rehearsal(self) -> bool:
        """A CPU is to do what a GPU would be given."""
        return self.device == "rehearsal"


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
