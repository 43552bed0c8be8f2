"""What all optimizers here share: state kept in named slots, and all that follows from them.

An optimizer declares which slots one parameter (or one block of it, layout.py) has, as names and
shapes. From that alone this class creates the state, gathers it from the ranks that own it, saves
and loads it as `state_dict` or as flat tensors for safetensors, checks what is loaded, and counts
its bytes. torch's own `state` dict stays empty: the tensors live in `blocks`.
"""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import unwrap
from typing import Any, ClassVar, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from speedrun.config.optimizer import UpdateOptions
from speedrun.optim.errors import OptimError
from speedrun.optim.finite import refuse_non_finite
from speedrun.optim.layout import Block, Matrices, Whole
from speedrun.optim.options import read_options
from speedrun.optim.state import NamedState, check_state, merge_options, unpack

Shape = tuple[int, ...]


@dataclass(slots=True, eq=False)
class ParamBlock:
    """A block of a parameter with its options and its state.

    `slots` are the shapes for one tile; `state` holds (*grid, *slot shape), fp32. It is empty on
    ranks that do not own the block; an owner of None means that every rank holds it. Where ranks
    are sent the gradients of their own blocks alone, `shard` is where this one's arrives.
    """

    param: Tensor
    name: str
    group: dict[str, Any]
    block: Block
    slots: dict[str, Shape]
    owner: int | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
    shard: Tensor | None = None

    @property
    def num_tiles(self) -> int:
        return math.prod(self.block.grid)

    @property
    def numel(self) -> int:
        return self.num_tiles * math.prod(self.block.shape)

    def gradient(self) -> Tensor | None:
        """As tiles, if the parameter has one."""
        grad = self.param.grad
        if grad is None or self.shard is not None:
            return None if grad is None else self.shard
        return self.block.as_tiles(grad.contiguous() if isinstance(self.block, Matrices) else grad)

    def state_shape(self, slot: str) -> Shape:
        return (*self.block.grid, *self.slots[slot])

    def state_bytes(self) -> int:
        """Over all ranks. Scalars, such as Adam's count of steps, are left out."""
        shapes = [self.state_shape(slot) for slot, shape in self.slots.items() if shape]
        return sum(4 * math.prod(shape) for shape in shapes)


@overload
def where(good: None, yes: float, no: float) -> float: ...
@overload
def where(good: Tensor | None, yes: float, no: float) -> float | Tensor: ...
def where(good: Tensor | None, yes: float, no: float) -> float | Tensor:
    """A factor of an update: a number, or one that the device chooses when it gets there."""
    return yes if good is None else torch.where(good, yes, no)


class SlotOptimizer(Optimizer, ABC):
    """A torch.optim.Optimizer whose state follows from declared slots."""

    options: ClassVar[type[UpdateOptions]] = UpdateOptions
    # Options that say how a parameter is read: a saved state that differs in one is refused.
    fixed: ClassVar[tuple[str, ...]] = ()
    # Options that depend on the machine: loading leaves them as they are.
    kept: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        check_finite: bool = True,
        **options: Any,
    ) -> None:
        self.check_finite = check_finite
        self.blocks: list[ParamBlock] = []
        self._join(process_group)
        given = options if lr is None else {"lr": lr, **options}
        super().__init__(params, read_options(self.options, given))

    def _join(self, process_group: dist.ProcessGroup | None) -> None:
        self._process_group = process_group
        self.world, self.rank = 1, 0
        if dist.is_available() and dist.is_initialized():
            self.world = dist.get_world_size(process_group)
            self.rank = dist.get_rank(process_group)
            if self.rank < 0:
                raise OptimError("this process is not in the process_group given to the optimizer")

    # What an optimizer declares.

    def slots(self, block: Block, options: Mapping[str, Any]) -> dict[str, Shape]:  # noqa: ARG002
        """The state of one tile under these options: the shape of each slot by name."""
        return {}

    def read_blocks(self, param: Tensor, name: str, options: Mapping[str, Any]) -> Sequence[Block]:  # noqa: ARG002
        """The blocks of a parameter, or a refusal; by default it is one block."""
        if not param.is_floating_point():
            needs = f"{type(self).__name__} needs floating point"
            raise OptimError(f"parameter {name} is {param.dtype}, but {needs}")
        return [Whole(tuple(param.shape))]

    def allocate(self, blocks: list[ParamBlock]) -> None:
        """Create the state of new blocks; by default all of it on every rank."""
        for block in blocks:
            for slot in block.slots:
                shape, like = block.state_shape(slot), block.param
                # Kernels that run over a parameter and its state need one memory format for both.
                block.state[slot] = (
                    torch.zeros_like(like, dtype=torch.float32)
                    if shape == like.shape
                    else torch.zeros(shape, device=like.device)
                )

    def shares(self) -> list[list[ParamBlock]]:
        """Blocks that ranks share out among them, by what is best sent to all owners at once."""
        return []

    def prepare(self) -> None:
        """Allocate what a step needs, so that the first one takes no longer than the others."""

    def finish(self) -> None:
        """Wait for what `update` has begun."""

    @abstractmethod
    def update(self, good: Tensor | None = None) -> None:
        """Update every parameter that has a gradient; leave all as it is where not `good`."""

    # Param groups and steps. torch wraps `add_param_group` and `zero_grad` so that its compiler
    # leaves them alone, and the wrapper imports that compiler at its first call: 1.3 s of a run
    # that compiles nothing.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        unwrap(Optimizer.add_param_group)(self, param_group)
        params = param_group["params"]
        unnamed = [f"parameter {i}" for i, _ in enumerate(params, len(self._by_parameter()))]
        names = param_group.get("param_names", unnamed)
        try:
            param_group.update(self.read_group(param_group))
            blocks = [
                ParamBlock(param, name, param_group, block, self.slots(block, param_group))
                for name, param in zip(names, params, strict=True)
                for block in self.read_blocks(param, name, param_group)
            ]
        except OptimError:
            self.param_groups.pop()
            raise
        self.allocate(blocks)
        self.blocks += blocks

    @classmethod
    def read_group(cls, group: Mapping[str, Any]) -> dict[str, Any]:
        """The checked options of a param group, which may hold other keys as well."""
        given = {name: group[name] for name in cls.options.names() if name in group}
        return read_options(cls.options, given)

    def set_momentum(self, value: float) -> None:
        """Set Muon's momentum, for instance from a schedule; Adam's betas stay."""
        for group in self.param_groups:
            if "momentum" in group:
                group["momentum"] = value

    def zero_grad(self, set_to_none: bool = True) -> None:
        unwrap(Optimizer.zero_grad)(self, set_to_none)

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
            self.refuse_non_finite()
        self.update()
        self.finish()
        return loss

    @torch.no_grad()
    def step_where(self, good: Tensor) -> None:
        """A step, or none at all, to the last digit, where `good` is false.

        `good` is a 0-d boolean on the parameters' device, which nobody waits for: it enters the
        arithmetic. Gradients may be anything where it is false. A zero may lose its sign.
        """
        self.update(good)
        self.finish()

    def refuse_non_finite(self) -> None:
        refuse_non_finite((first.name, first.param) for first, *_ in self._by_parameter())

    # State. A slot as large as the parameter leaves and enters in the parameter's own shape,
    # another as (tiles, *shape), without `tiles` if there is one, or flat if there are many blocks.

    def state_bytes(self) -> int:
        """Bytes of state that this rank holds, scalars left out."""
        return sum(block.state_bytes() for block in self.blocks if block.state)

    def expected_state(self) -> dict[str, dict[str, Shape]]:
        """The shape of every slot as it is saved, by parameter name."""
        return {
            blocks[0].name: {slot: _saved_shape(of, slot) for slot, of in _by_slot(blocks).items()}
            for blocks in self._by_parameter()
        }

    @torch.no_grad()
    def whole_state(self, device: str | None = None) -> dict[Tensor, dict[str, Tensor]]:
        """Copies of all state on every rank. With several ranks all of them must call this.

        `device` is where the copies go, one at a time: the CPU spares a GPU the whole state.
        """
        whole: dict[Tensor, dict[str, Tensor]] = {}
        for blocks in self._by_parameter():
            param = blocks[0].param
            whole[param] = {}
            for slot, of in _by_slot(blocks).items():
                saved = torch.empty(_saved_shape(of, slot), device=device or param.device)
                for block, view in zip(of, _views(of, slot, saved), strict=True):
                    view.copy_(self._from_owner(block, slot))
                whole[param][slot] = saved
        return whole

    def _from_owner(self, block: ParamBlock, slot: str) -> Tensor:
        if block.owner is None or self.world == 1:
            return block.state[slot]
        if block.owner == self.rank:
            value = block.state[slot].contiguous()
        else:
            value = torch.empty(block.state_shape(slot), device=block.param.device)
        ranks = self._process_group or dist.group.WORLD
        assert ranks is not None
        dist.broadcast(value, dist.get_global_rank(ranks, block.owner), ranks)
        return value

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's form, the same for any number of ranks; all must call this."""
        empty, self.state = self.state, self.whole_state()  # type: ignore[assignment]
        try:
            return super().state_dict()
        finally:
            self.state = empty

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` saved on any number of ranks. Nothing is changed unless all fits."""
        expected = self.expected_state()
        saved = unpack(state_dict, self.param_groups, list(expected))
        check_state(saved, expected)
        merged = merge_options(state_dict["param_groups"], self.param_groups, self.fixed, self.kept)
        checked = [{**group, **self.read_group(group)} for group in merged]
        for group, new in zip(self.param_groups, checked, strict=True):
            group.update(new)
        self._load(saved)

    def export_state(self) -> dict[str, Tensor]:
        """The whole state as {'name:slot': tensor}, copied to the CPU; fit for safetensors.

        Learning rates and the like are not in it: they are functions of the step. With several
        ranks all of them must call this, and all get the whole.
        """
        whole = self.whole_state("cpu")
        return {
            f"{first.name}:{slot}": tensor
            for first, *_ in self._by_parameter()
            for slot, tensor in whole[first.param].items()
        }

    def import_state(self, flat: Mapping[str, Tensor]) -> None:
        """Load what `export_state` gave, on any number of ranks. All or nothing."""
        saved: NamedState = {}
        for key, tensor in flat.items():
            name, _, slot = key.rpartition(":")
            saved.setdefault(name, {})[slot] = tensor
        check_state(saved, self.expected_state())
        self._load(saved)

    @torch.no_grad()
    def _load(self, saved: NamedState) -> None:
        for blocks in self._by_parameter():
            by_slot = _by_slot(blocks)
            for slot, tensor in saved[blocks[0].name].items():
                of = by_slot[slot]
                views = _views(of, slot, tensor.contiguous())
                for block, view in zip(of, views, strict=True):
                    if block.state:
                        block.state[slot].copy_(view)

    def _by_parameter(self) -> list[list[ParamBlock]]:
        found: defaultdict[Tensor, list[ParamBlock]] = defaultdict(list)
        for block in self.blocks:
            found[block.param].append(block)
        return list(found.values())

    def __getstate__(self) -> dict[str, Any]:
        own = ("blocks", "check_finite", "world")
        return {**super().__getstate__(), **{key: getattr(self, key) for key in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy works in the default process group, whose ranks must be those of the original."""
        super().__setstate__(state)
        self._join(None)
        if self.world != state["world"]:
            raise OptimError(
                f"the copied state is shared out over {state['world']} ranks, not {self.world}; "
                f"carry it over with state_dict() and load_state_dict()"
            )


def _by_slot(blocks: list[ParamBlock]) -> dict[str, list[ParamBlock]]:
    """The blocks of a parameter that have each slot."""
    found: defaultdict[str, list[ParamBlock]] = defaultdict(list)
    for block in blocks:
        for slot in block.slots:
            found[slot].append(block)
    return found


def _saved_shape(blocks: list[ParamBlock], slot: str) -> Shape:
    """The shape in which a slot of a parameter leaves the optimizer."""
    if _is_full(blocks, slot):
        return tuple(blocks[0].param.shape)
    if len(blocks) > 1:
        return (sum(math.prod(block.state_shape(slot)) for block in blocks),)
    [block] = blocks
    return (block.num_tiles, *block.slots[slot]) if block.num_tiles > 1 else block.slots[slot]


def _views(blocks: list[ParamBlock], slot: str, saved: Tensor) -> list[Tensor]:
    """Each block's state inside a tensor of the saved shape."""
    if _is_full(blocks, slot):
        return [block.block.as_tiles(saved) for block in blocks]
    shapes = [block.state_shape(slot) for block in blocks]
    parts = torch.split(saved.view(-1), [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _is_full(blocks: list[ParamBlock], slot: str) -> bool:
    return all(block.slots[slot] == block.block.shape for block in blocks)
