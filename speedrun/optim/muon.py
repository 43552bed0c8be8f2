"""Muon: momentum, orthogonalised. The optimizer for the hidden matrices of a network.

    M <- lerp(M, g, 1 - mu);  u = lerp(g, M, mu);  W <- (1 - lr wd) W - lr scale orthogonalize(u)

One class for one process or many. With a process group every rank owns a share of the matrices: it
alone keeps their momenta and computes their updates, which travel by asynchronous all_gather while
the next ones are computed (walk.py). All ranks, the owner included, apply what arrived, so weights
that start equal stay equal bit for bit. Gradients must already be averaged, as DDP does.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from speedrun.optim.base import UncompiledOptimizer
from speedrun.optim.errors import OptimError
from speedrun.optim.finite import refuse_non_finite
from speedrun.optim.layout import read_layout, update_scale
from speedrun.optim.orthogonalize import Coefficients, iteration, orthogonalize
from speedrun.optim.state import (
    NamedState,
    check_state,
    gather_momenta,
    merge_options,
    parameter_names,
    unpack,
)
from speedrun.optim.walk import Item, Shelf, Stop, all_gather, plan_stops, shelve

# Options that say how a parameter is read; they belong to the model and cannot change on loading.
READING = ("batch_dims", "row_dims", "split_rows", "split_cols")


class Muon(UncompiledOptimizer):
    """Muon for parameters of 2 or more dimensions: tensors, (name, tensor) pairs or param groups.

    Every argument below except `process_group` and `check_finite` can be set per param group.

    lr              step size; see docs/muon.md for how it maps to Adam's and torch.optim.Muon's
    momentum        mu; set it per step with `set_momentum`
    nesterov        look one step ahead
    weight_decay    decoupled, times lr
    scale           'spectral', 'longest', 'rms' or 'none': factor by shape (layout.py)
    coefficients    'classic', 'polar_express' or a list of (a, b, c)
    steps           iterations of the polynomial
    eps             guard of the normalisation
    dtype           of the orthogonalisation and of the wire; None: bf16 where native, else fp32
    batch_dims, row_dims, split_rows, split_cols   how a parameter is read as matrices (layout.py)
    process_group   None: the default group if torch.distributed is initialised, else one process
    check_finite    refuse a NaN or infinite gradient before anything is changed; without it the
                    caller must check, or it will enter the momentum
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        scale: str = "spectral",
        coefficients: Coefficients = "classic",
        steps: int = 5,
        eps: float = 1e-7,
        dtype: torch.dtype | None = None,
        batch_dims: int | None = None,
        row_dims: int | None = None,
        split_rows: int | tuple[int, ...] = 1,
        split_cols: int | tuple[int, ...] = 1,
        process_group: dist.ProcessGroup | None = None,
        check_finite: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "scale": scale,
            "coefficients": coefficients,
            "steps": steps,
            "eps": eps,
            "dtype": dtype,
            "batch_dims": batch_dims,
            "row_dims": row_dims,
            "split_rows": split_rows,
            "split_cols": split_cols,
        }
        self.check_finite = check_finite
        self._built = False
        self._join(process_group)
        super().__init__(params, defaults)
        self._build()

    def _join(self, process_group: dist.ProcessGroup | None) -> None:
        self._process_group = process_group
        self.world, self.rank = 1, 0
        if dist.is_available() and dist.is_initialized():
            self.world = dist.get_world_size(process_group)
            self.rank = dist.get_rank(process_group)
            if self.rank < 0:
                raise OptimError("this process is not in the process_group given to Muon")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if not self._built:
            return
        try:
            self._build()
        except OptimError:
            self.param_groups.pop()
            raise

    def _build(self) -> None:
        """Read every parameter, share them out, and create the momenta and buffers."""
        for group in self.param_groups:
            _check_options(group)
        items = [
            Item(param, name, read_layout(tuple(param.shape), group, name), group)
            for group, param, name in self._named()
        ]
        for item in items:
            _refuse_unusable(item)
        self._watched = [(item.name, item.param) for item in items]
        self._shelves: list[Shelf] = shelve(items, self.world)
        for item in self._items():
            if item.owner == self.rank and "momentum" not in self.state[item.param]:
                momentum = torch.zeros(item.param.shape, device=item.param.device)
                self.state[item.param]["momentum"] = momentum
        self._stops: list[Stop] = plan_stops(self._shelves, self.world, self.rank)
        self._built = True

    def _named(self) -> Iterator[tuple[dict[str, Any], Tensor, str]]:
        for group, names in zip(self.param_groups, parameter_names(self), strict=True):
            for param, name in zip(group["params"], names, strict=True):
                yield group, param, name

    def _items(self) -> Iterator[Item]:
        for shelf in self._shelves:
            yield from shelf

    def owner_of(self, param: Tensor) -> int:
        """The rank that keeps the momentum of `param` and computes its updates."""
        return next(item.owner for item in self._items() if item.param is param)

    def set_momentum(self, value: float) -> None:
        """Set mu of every group, for instance to schedules.momentum(step)."""
        for group in self.param_groups:
            group["momentum"] = value

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.check_finite:
            refuse_non_finite(self._watched)
        on_the_wire: tuple[Stop, dist.Work] | None = None
        for stop in self._stops:
            self._compute(stop)
            if self.world == 1:
                _apply(stop)
                continue
            if on_the_wire is not None:
                _arrive(*on_the_wire)
            work = all_gather(stop.received, stop.outgoing, self._process_group)
            on_the_wire = stop, work
        if on_the_wire is not None:
            _arrive(*on_the_wire)
        return loss

    def _compute(self, stop: Stop) -> None:
        """Fold the gradients into this rank's momenta and orthogonalise the result in one batch."""
        group = stop.group
        mu = group["momentum"]
        mine = stop.items_of[self.rank]
        for item, slot in zip(mine, stop.slots, strict=True):
            if item.param.grad is None:
                continue
            momentum = self.state[item.param]["momentum"]
            grad = item.param.grad.to(momentum.dtype).contiguous()
            momentum.lerp_(grad, 1 - mu)
            if group["nesterov"]:
                tiles = item.layout.tiles
                torch.lerp(tiles(grad), tiles(momentum), mu, out=slot)
            else:
                slot.copy_(item.layout.tiles(momentum))
        if not mine:
            return
        layout = mine[0].layout
        for staged, sent in zip(layout.cut(stop.staged), layout.cut(stop.sent), strict=True):
            orthogonalize(
                staged,
                steps=group["steps"],
                coefficients=group["coefficients"],
                eps=group["eps"],
                dtype=sent.dtype,
                out=sent,
                scratch=stop.scratch,
            )
            if layout.is_cut:
                sent.mul_(update_scale(group["scale"], *sent.shape[-2:]))

    def state_dict(self) -> dict[str, Any]:
        """The whole state, whatever the number of ranks; with several, all of them must call this.

        It has the form of any torch optimizer's: one full `momentum` per parameter, in order, with
        `param_names` if names were given. It loads on any number of ranks.
        """
        own, self.state = self.state, self.gathered_state()
        try:
            return super().state_dict()
        finally:
            self.state = own

    def gathered_state(self, device: str | None = None) -> defaultdict[Tensor, dict[str, Tensor]]:
        """Every parameter's momentum on every rank, and all must call this; on one, no copies."""
        return gather_momenta(
            self._shelves, self.state, self.world, self.rank, self._process_group, device
        )

    def expected_state(self) -> dict[str, dict[str, torch.Size]]:
        """The shape of every slot, by parameter name."""
        return {item.name: {"momentum": item.param.shape} for item in self._items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` saved on any number of ranks; each rank keeps the momenta it owns.

        Nothing is changed unless all of it fits. `dtype` stays as it is here: it is the device's.
        """
        saved = unpack(self, state_dict)
        check_state(saved, self.expected_state())
        saved_groups = state_dict["param_groups"]
        options = merge_options(saved_groups, self.param_groups, fixed=READING, kept=("dtype",))
        for chosen in options:
            _check_options({**self.defaults, **chosen})
        for group, chosen in zip(self.param_groups, options, strict=True):
            group.update(chosen)
        self.load_named(saved)

    @torch.no_grad()
    def load_named(self, saved: NamedState) -> None:
        """Copy checked state into the momenta this rank owns."""
        for item in self._items():
            if item.owner == self.rank:
                self.state[item.param]["momentum"].copy_(saved[item.name]["momentum"])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "check_finite": self.check_finite}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy makes its own plan and buffers, in the default process group."""
        super().__setstate__(state)
        self._join(None)
        self._build()


def _arrive(stop: Stop, work: dist.Work) -> None:
    work.wait()
    _apply(stop)


def _apply(stop: Stop) -> None:
    """Take the updates of a stop off the weights; on every rank alike."""
    lr, decay = stop.group["lr"], stop.group["weight_decay"]
    for items, arrivals in zip(stop.items_of, stop.arrivals, strict=True):
        for item, update in zip(items, arrivals, strict=True):
            if item.param.grad is None:
                continue
            if decay:
                item.param.mul_(1 - lr * decay)
            layout = item.layout
            scale = 1.0 if layout.is_cut else update_scale(stop.group["scale"], *layout.tile_shape)
            layout.tiles(item.param).add_(update, alpha=-lr * scale)


def _check_options(options: Mapping[str, Any]) -> None:
    for key, low, high in (
        ("lr", 0.0, math.inf),
        ("weight_decay", 0.0, math.inf),
        ("momentum", 0.0, 1.0),
        ("eps", 0.0, math.inf),
    ):
        if not low <= options[key] <= high:
            raise OptimError(f"{key} is {options[key]}, but must lie between {low} and {high}")
    if not options["eps"]:
        raise OptimError("eps is 0, but a zero gradient must be divided by something; use 1e-7")
    iteration(options["coefficients"], options["steps"])
    update_scale(options["scale"], 1, 1)
    dtype = options["dtype"]
    if dtype is not None and not dtype.is_floating_point:
        raise OptimError(f"dtype is {dtype}, but the orthogonalisation needs a floating-point one")


def _refuse_unusable(item: Item) -> None:
    param, name = item.param, item.name
    if hasattr(param, "placements"):
        raise OptimError(
            f"parameter {name} is sharded (DTensor), but Muon needs whole matrices on every rank; "
            f"use DistributedDataParallel instead of FSDP or tensor parallelism"
        )
    if not param.is_floating_point():
        raise OptimError(f"parameter {name} is {param.dtype}, but Muon needs real floating point")
    if not param.is_contiguous():
        raise OptimError(
            f"parameter {name} is not contiguous; store it as .contiguous() before training"
        )
