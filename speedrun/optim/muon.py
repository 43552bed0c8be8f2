"""Muon: momentum, orthogonalised. The optimizer for the hidden matrices of a network.

    M <- lerp(M, g, 1 - mu);  u = lerp(g, M, mu);  W <- (1 - lr wd) W - lr scale orthogonalize(u)

Two options: NorMuon (`neuron_beta`) evens out how far the neurons of a matrix move, and cautious
decay (`cautious`) shrinks only the weights that the update shrinks as well.

One class for one process or many. With a process group every rank owns a share of the matrices: it
alone keeps their state and computes their updates, which travel by asynchronous all_gather while
the next ones are computed (buckets.py). All ranks, the owner included, apply what arrived, so
weights that start equal stay equal bit for bit. Gradients must already be averaged, as DDP does, or
at least those of a rank's own matrices (`ParamBlock.shard`).

Shapes: N matrices of R outputs and C inputs.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError
from torch import Tensor
from torch.optim.optimizer import ParamsT

from speedrun.config.fields import Positive
from speedrun.config.optimizer import MuonOptions, NamedCoefficients
from speedrun.optim.base import ParamBlock, Shape, SlotOptimizer, where
from speedrun.optim.buckets import (
    Bucket,
    MatrixBatch,
    all_gather,
    make_batches,
    make_buckets,
    upright,
)
from speedrun.optim.errors import OptimError
from speedrun.optim.layout import Block, read_matrices, update_scale
from speedrun.optim.options import documented
from speedrun.optim.orthogonalize import Triple, orthogonalize

Split = int | Annotated[tuple[int, ...], Field(strict=False)]
Triples = Annotated[tuple[Annotated[Triple, Field(strict=False)], ...], Field(strict=False)]


DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}


class MuonArguments(MuonOptions):
    """A recipe's options, and those that only a caller in Python can set."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    coefficients: NamedCoefficients | Triples = Field(  # type: ignore[assignment]  # wider
        MuonOptions.model_fields["coefficients"].default,
        description="'classic', 'polar_express' or your own (a, b, c) per iteration",
    )
    eps: Positive = Field(1e-7, description="added to the norm, which may be zero")
    dtype: torch.dtype | None = Field(  # type: ignore[assignment]  # torch's, and any of them
        "auto",  # read as None
        validate_default=True,
        description="of the orthogonalisation and of the wire: torch's, or a recipe's word; auto "
        "or None: bf16 where native",
    )
    overlap: bool = Field(
        True, description="updates travel while the next are computed; off: each is waited for"
    )
    batch_dims: int | None = Field(None, description="leading dimensions that count matrices")
    row_dims: int | None = Field(None, description="dimensions that form the rows")
    split_rows: Split = Field(1, description="blocks of rows orthogonalised apart, or their sizes")
    split_cols: Split = Field(1, description="the same for columns")

    @field_validator("dtype", mode="before")
    @classmethod
    def _read_dtype(cls, value: Any) -> Any:
        return DTYPES.get(value, value) if isinstance(value, str) else value

    @field_validator("dtype")
    @classmethod
    def _check_dtype(cls, value: torch.dtype | None) -> torch.dtype | None:
        if value is not None and not value.is_floating_point:
            raise PydanticCustomError("dtype", "it must be a floating-point type")
        return value


def muon_update(
    grad_NRC: Tensor,
    state: Mapping[str, Tensor],
    options: Mapping[str, Any],
    *,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
    good: Tensor | None = None,
) -> Tensor:
    """The updates of N matrices, to be taken off the weights times lr and the scale of the shape.

    Changes the state (N, *slot shape) and uses the memory of the gradients. Where not `good` the
    state takes nothing of gradients that must be finite all the same.
    """
    mu = options["momentum"]
    momentum_NRC = state["momentum"].lerp_(grad_NRC, where(good, 1 - mu, 0.0))
    update_NRC = orthogonalize(
        grad_NRC.lerp_(momentum_NRC, mu) if options["nesterov"] else momentum_NRC,
        iterations=options["iterations"],
        coefficients=options["coefficients"],
        eps=options["eps"],
        dtype=options["dtype"],
        out=out,
        scratch=scratch,
    )
    if options["neuron_beta"]:
        _even_out(update_NRC, state, where(good, 1 - options["neuron_beta"], 0.0), scratch)
    return update_NRC


def _even_out(
    update_NRC: Tensor, state: Mapping[str, Tensor], share: float | Tensor, scratch: Tensor | None
) -> None:
    """NorMuon: V <- lerp(V, mean O^2, share) per neuron; O <- O / sqrt(V), as long as it was.

    The neurons are those along the longer side. V starts at 0 and needs no correction for that: it
    is too small by one factor for all of them, which the last step takes out. Beside the squares
    of O one multiplication does it all, because the norm after it follows from them.
    """
    if "neurons" not in state:
        raise OptimError(
            "neuron_beta was 0 when the optimizer was made, so there is no state for it; "
            "give it to the constructor, or with the param group when that is added"
        )
    neurons = state["neurons"]
    across = -1 if neurons.size(-1) == 1 else -2
    # Squares first, then their mean: on a CPU torch's norm takes 8 times as long across rows.
    if scratch is None:
        squares_NRC = update_NRC.square()
    else:
        squares_NRC = upright(scratch[: update_NRC.numel()], tuple(update_NRC.shape[-2:]))
        torch.mul(update_NRC, update_NRC, out=squares_NRC)
    square = squares_NRC.mean(across, keepdim=True, dtype=neurons.dtype)
    neurons.lerp_(square, share)
    # A neuron that never moved has V = 0 and O = 0, and keeps them.
    tiny = torch.finfo(neurons.dtype).tiny
    factor = neurons.clamp(min=tiny).rsqrt_()
    before = square.sum((-2, -1), keepdim=True)
    after = square.mul_(factor).mul_(factor).sum((-2, -1), keepdim=True)
    update_NRC.mul_(factor.mul_(before.div_(after.clamp_(min=tiny)).sqrt_()))


@documented
class Muon(SlotOptimizer):
    """Muon for parameters of 2 or more dimensions: tensors, (name, tensor) pairs or param groups.

    Every option can be set per param group. `process_group` is by default the default group if
    torch.distributed is initialised, else this process alone. `check_finite` refuses a NaN or
    infinite gradient before anything is changed; without it the caller must check, or it will
    enter the momentum. docs/muon.md says how learning rates map to Adam's.
    """

    options = MuonArguments
    fixed = ("batch_dims", "row_dims", "split_rows", "split_cols")
    kept = ("dtype", "overlap")

    def __init__(self, params: ParamsT, lr: float | None = None, **options: Any) -> None:
        self._batches: list[MatrixBatch] = []
        super().__init__(params, lr, **options)

    def slots(self, block: Block, options: Mapping[str, Any]) -> dict[str, Shape]:
        if not options["neuron_beta"]:
            return {"momentum": block.shape}
        rows, cols = block.shape
        return {"momentum": block.shape, "neurons": (rows, 1) if rows >= cols else (1, cols)}

    def read_blocks(self, param: Tensor, name: str, options: Mapping[str, Any]) -> Sequence[Block]:
        blocks = read_matrices(tuple(param.shape), options, name)
        if hasattr(param, "placements"):
            raise OptimError(
                f"parameter {name} is sharded (DTensor), but Muon needs whole matrices on every "
                f"rank; use DistributedDataParallel instead of FSDP or tensor parallelism"
            )
        if not param.is_floating_point():
            raise OptimError(
                f"parameter {name} is {param.dtype}, but Muon needs real floating point"
            )
        if not param.is_contiguous():
            raise OptimError(
                f"parameter {name} is not contiguous; store it as .contiguous() before training"
            )
        return blocks

    def allocate(self, blocks: list[ParamBlock]) -> None:
        self._batches += make_batches(blocks, len(self.blocks), self.world, self.rank)
        self.__dict__.pop("buckets", None)

    def shares(self) -> list[list[ParamBlock]]:
        return [batch.blocks for batch in self._batches]

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Made by `prepare` or at the first step, and again after param groups were added."""
        return make_buckets(self._batches, self.world, self.rank)

    def prepare(self) -> None:
        """Make the buckets."""
        _ = self.buckets

    def update(self, good: Tensor | None = None) -> None:
        """Compute, gather and apply, bucket by bucket; a gather runs while the next is computed."""
        gathering: tuple[Bucket, dist.Work] | None = None
        for bucket in self.buckets:
            _compute(bucket, self.rank, good)
            if self.world == 1:
                _apply(bucket, good)
                continue
            if gathering is not None:
                _apply(gathering[0], good, gathering[1])
            gathering = bucket, all_gather(bucket.received, bucket.sent, self._process_group)
            if not bucket.group["overlap"]:
                _apply(bucket, good, gathering[1])
                gathering = None
        if gathering is not None:
            _apply(gathering[0], good, gathering[1])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_batches": self._batches}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for batch in self._batches:  # a pickle keeps no memory that two tensors shared
            batch.share_state(self.rank)


def _compute(bucket: Bucket, rank: int, good: Tensor | None) -> None:
    """Update the state of this rank's matrices and work out their updates in one batch."""
    mine = bucket.blocks_of[rank]
    if not mine:
        return
    # A matrix without a gradient is part of the batch, but its state is put back afterwards.
    before: list[tuple[Tensor, Tensor]] = []
    for block, place in zip(mine, bucket.grads, strict=True):
        grad = block.gradient()
        if grad is None:
            before += [(slot, slot.clone()) for slot in block.state.values()]
            place.zero_()
        else:
            place.copy_(grad)
    options = {**bucket.group, "dtype": bucket.update.dtype}
    bad = None if good is None else good.logical_not()
    if bad is not None:
        bucket.grad.masked_fill_(bad, 0.0)
    muon_update(
        bucket.grad, bucket.state, options, out=bucket.update, scratch=bucket.scratch, good=good
    )
    if bad is not None:
        bucket.update.masked_fill_(bad, 0.0)
    for slot, kept in before:
        slot.copy_(kept)


def _apply(bucket: Bucket, good: Tensor | None, work: dist.Work | None = None) -> None:
    """Take the updates of a bucket, once gathered, off the weights; on every rank alike.

    Where not `good` they are 0 already.
    """
    if work is not None:
        work.wait()
    lr, shrink = bucket.group["lr"], bucket.group["lr"] * bucket.group["weight_decay"]
    kept = where(good, 1 - shrink, 1.0) if shrink else 1.0
    bad = good.logical_not() if good is not None and shrink else None
    for blocks, updates in zip(bucket.blocks_of, bucket.updates, strict=True):
        for block, update in zip(blocks, updates, strict=True):
            if block.param.grad is None:
                continue
            weight = block.block.as_tiles(block.param)
            if shrink and bucket.group["cautious"]:
                _shrink_cautiously(weight, update, shrink, bucket.scratch, bad)
            elif shrink:
                weight.mul_(kept)
            weight.add_(update, alpha=-lr * update_scale(bucket.group["scale"], *update.shape[-2:]))


def _shrink_cautiously(
    weight: Tensor, update: Tensor, shrink: float, scratch: Tensor, bad: Tensor | None
) -> None:
    """Shrink the weights where the update, which is taken off, does not make them grow."""
    agrees = scratch[: weight.numel()].view(weight.shape)
    torch.mul(update, weight, out=agrees).ge_(0)
    if bad is not None:
        agrees.masked_fill_(bad, 0.0)
    weight.addcmul_(weight, agrees, value=-shrink)
