"""What a recipe can say about the optimizers: the options of Muon and Adam, and who gets which.

This is the only declaration of an option's name, type, range, default and meaning. The optimizers
(speedrun/optim) read their arguments, checks and help from these classes, and the model takes the
names of the parameter roles from here. Nothing in this file needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from speedrun.config.code import UsedCode
from speedrun.config.fields import Amount, Count, Fraction, NonNegative, Section, Technique, refuse

Role = Literal[
    "hidden", "qkv", "q", "k", "embedding", "value_embedding", "bigram", "head", "scalar"
]
ROLES: tuple[Role, ...] = get_args(Role)
MATRIX_ROLES: tuple[Role, ...] = ("hidden", "qkv", "q", "k")  # matrices inside the blocks
# By `optimizer.kind`: the table that says what is done with those matrices.
MATRIX_TABLES = {"adamw": "hidden", "muon": "muon", "own": "hidden"}

Betas = Annotated[tuple[Fraction, Fraction], Field(strict=False)]
POLAR_EXPRESS_LENGTH = 5  # its polynomials are made as a set, each for what the last leaves over
NamedCoefficients = Literal["classic", "polar_express"]
Precision = Literal["auto", "fp32", "bf16"]


class UpdateOptions(Section):
    """The options of one optimizer for one role of parameter."""

    kind: ClassVar[str]
    # Fields that a recipe has and the optimizer has not: they set a schedule or a layout.
    recipe_only: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def names(cls) -> list[str]:
        """The options of the optimizer itself."""
        return [name for name in cls.model_fields if name not in cls.recipe_only]

    def values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.names()}


class AdamOptions(UpdateOptions):
    """Adam with decoupled weight decay for one role of parameter."""

    kind = "adam"

    lr: NonNegative = Field(0.001, description="peak learning rate")
    betas: Betas = Field((0.9, 0.95), description="decay of the two moments")
    eps: NonNegative = Field(1e-8, description="added to the root of the second moment")
    weight_decay: NonNegative = Field(0.0, description="decoupled, times the learning rate")


class MuonOptions(UpdateOptions):
    """Muon for the hidden matrices."""

    kind = "muon"
    recipe_only = frozenset({"momentum_start", "split_qkv", "heads_together"})

    lr: NonNegative = Field(0.02, description="peak learning rate")
    momentum: Fraction = Field(0.95, description="weight of the past, after its warm-up")
    momentum_start: Fraction = Field(0.95, description="weight of the past at step 0")
    nesterov: bool = Field(True, description="step along the gradient one step ahead")
    weight_decay: NonNegative = Field(0.0, description="decoupled, times the learning rate")
    cautious: Annotated[bool, Technique("cautious decay", off=False)] = Field(
        False, description="decay only the weights that the update shrinks as well"
    )
    neuron_beta: Annotated[Fraction, Technique("NorMuon", off=0.0)] = Field(
        0.0, description="decay of each neuron's mean square update (NorMuon); 0: none"
    )
    scale: Literal["spectral", "longest", "rms", "none"] = Field(
        "spectral",
        description="factor on the update; spectral: sqrt(max(1, rows/cols)), longest: "
        "sqrt(max(rows, cols)), rms: 0.2 of that, none: 1",
    )
    coefficients: NamedCoefficients = Field(
        "classic", description="polynomials of the orthogonalisation"
    )
    iterations: Count = Field(
        5, validate_default=True, description="rounds of the orthogonalisation"
    )
    dtype: Precision = Field(
        "auto",
        description="numbers of the orthogonalisation and of the updates that ranks send; auto: "
        "bf16 on GPUs, fp32 on CPUs",
    )
    split_qkv: bool = Field(False, description="orthogonalise q, k and v of a fused matrix apart")
    heads_together: Annotated[Amount, Technique("Muon by heads", off=0)] = Field(
        0, description="heads of q and k orthogonalised as one, such as 2 for pairs; 0: all"
    )

    @field_validator("iterations")
    @classmethod
    def _check_iterations(cls, value: int, info: ValidationInfo) -> int:
        # Without coefficients in `data` they were refused themselves, and that is the message.
        problem = iterations_problem(info.data.get("coefficients", "classic"), value)
        if problem:
            raise PydanticCustomError("iterations", "{problem}", {"problem": problem})
        return value


def iterations_problem(coefficients: str | Sequence[object], iterations: int) -> str:
    """Why these polynomials cannot be run for so many rounds; empty if they can."""
    if coefficients == "classic":
        return "" if 1 <= iterations <= 100 else "'classic' takes 1 to 100 iterations"
    named = coefficients == "polar_express"
    length = POLAR_EXPRESS_LENGTH if named else len(coefficients)
    if iterations == length and length > 0:
        return ""
    return f"{'polar_express has' if named else 'there are'} {length} triples, one per iteration"


class OwnOptions(UsedCode, UpdateOptions):
    """Any torch.optim.Optimizer that a recipe names, in place of ours."""

    kind = "own"

    scheduled: bool = Field(
        True, description="whether the schedule of the learning rate acts on that optimizer"
    )
    random: bool = Field(
        False, description="that optimizer draws random numbers: from a stream of its own"
    )


class RoleOptions(OwnOptions, AdamOptions):
    """AdamW for one role of parameter, or the optimizer that `use` names in its place."""

    kind = "adam"
    recipe_only = frozenset(OwnOptions.model_fields)

    @property
    def own(self) -> OwnOptions:
        return OwnOptions(**{name: getattr(self, name) for name in OwnOptions.model_fields})


class OptimizerConfig(Section):
    """The options for each role a parameter plays in the model."""

    kind: Annotated[Literal["adamw", "muon", "own"], Technique("Muon", off="adamw", on="muon")] = (
        Field(
            "adamw",
            description="of the hidden matrices; adamw: by optimizer.hidden, muon: by "
            "optimizer.muon, own: by optimizer.hidden.use, which sets this itself",
        )
    )
    clip: NonNegative = Field(0.0, description="largest norm of the whole gradient; 0: no limit")
    muon: MuonOptions = Field(MuonOptions(), description="matrices inside the blocks, kind = muon")
    hidden: RoleOptions = Field(
        RoleOptions(), description="matrices inside the blocks, kind = adamw"
    )
    embedding: RoleOptions = Field(
        RoleOptions(), description="token table (if not tied), positions"
    )
    value_embedding: RoleOptions = Field(RoleOptions(), description="value embedding tables")
    bigram: RoleOptions = Field(RoleOptions(), description="the table of token pairs")
    head: RoleOptions = Field(RoleOptions(), description="the head, tied or not")
    scalar: RoleOptions = Field(RoleOptions(), description="gains, biases, mixing and skip weights")

    def table(self, role: Role) -> str:
        """The table with the options of a role."""
        return MATRIX_TABLES[self.kind] if role in MATRIX_ROLES else role

    def of(self, role: Role) -> UpdateOptions:
        """What is done with the parameters of a role."""
        options: UpdateOptions = getattr(self, self.table(role))
        if isinstance(options, RoleOptions) and self.is_own(role):
            return options.own
        return options

    def group(self, role: Role) -> Role:
        """Where the parameters of a role belong: q and k to the others, unless cut into heads."""
        by_heads = self.kind == "muon" and self.muon.heads_together > 0
        return "hidden" if role in ("q", "k") and not by_heads else role

    def is_own(self, role: Role) -> bool:
        """Whether the parameters of a role go by an optimizer that the recipe names."""
        if role in MATRIX_ROLES:
            return self.kind == "own"
        options: RoleOptions = getattr(self, role)
        return bool(options.use)

    def unread(self) -> set[str]:
        """Keys that nothing reads, since the hidden matrices go by another table or by code."""
        tables = {*MATRIX_TABLES.values()} - {self.table("hidden")}
        found = {f"{table}.{name}" for table in tables for name, _ in getattr(self, table)}
        for role in (role for role in ROLES if role not in MATRIX_ROLES or role == "hidden"):
            if self.is_own(role):
                found |= {f"{role}.{name}" for name in RoleOptions.names()}
        return {f"optimizer.{key}" for key in found}

    def check_heads(self, of_q: int, of_k: int, *, fused: bool) -> None:
        """Refuse to take so many heads of q and k together as cannot be."""
        key, together = "optimizer.muon.heads_together", self.muon.heads_together
        if self.kind != "muon" or not together:
            return
        if fused and not self.muon.split_qkv:
            refuse(key, together, "in one matrix with v it needs optimizer.muon.split_qkv = true")
        if of_q % together or of_k % together:
            heads = f"the {of_q} heads of q and the {of_k} of k"
            refuse(key, together, f"it must divide {heads}; 0 takes all together")

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        """Zero is a value the optimizers take, but a recipe that says so has a mistake in it."""
        if self.kind == "own" and not self.hidden.use:
            allowed = "name the optimizer of the hidden matrices by optimizer.hidden.use"
            refuse("optimizer.kind", self.kind, allowed)
        for section, options in self:
            for key in ("lr", "eps"):
                if isinstance(options, UpdateOptions) and getattr(options, key, None) == 0:
                    refuse(f"optimizer.{section}.{key}", 0.0, "it must be greater than 0")
        return self
