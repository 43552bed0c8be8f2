"""Back from a tree and tensors (tree.py) to the state of an object, made anew or in use.

Everything is decoded and checked before anything is changed. Containers and objects that are in
place already are filled anew rather than exchanged, as others may hold them; tensors are new ones,
with the bits, type, strides and shared memory that they were saved with.
"""

from __future__ import annotations

import enum
import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from speedrun.optim.errors import OptimError
from speedrun.optim.foreign.tree import (
    FACTORIES,
    KEPT,
    MAPPINGS,
    SEQUENCES,
    Node,
    Owner,
    found_by_name,
    name_of,
)
from speedrun.traces import attributes_of, contents

Put = Callable[[], None]
BITS: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox,
                np.random.SFC64)
}  # fmt: skip


def read(
    tree: Mapping[str, Node],
    tensors: Mapping[str, Tensor],
    root: object,
    owner: Owner,
    likes: Mapping[str, Any],
) -> tuple[Put, dict[str, Any]]:
    """What puts the saved state into `root` when called, and what was saved beside it.

    `likes` is what stands beside it now.
    """
    reader = _Reader(tensors, owner)
    reader.fill(root, 0, tree["root"], "")
    beside = {k: reader.value(node, likes.get(k), k) for k, node in tree["beside"].items()}

    def put() -> None:
        for change in reader.changes:
            change()

    return put, beside


class _Reader:
    def __init__(self, tensors: Mapping[str, Tensor], owner: Owner) -> None:
        self.tensors, self.owner = tensors, owner
        self.changes: list[Put] = []
        self._made: dict[int, Any] = {}
        self._claimed: set[int] = set()
        self._memory: dict[str, torch.UntypedStorage] = {}
        self._device = next(iter(owner.params.values())).device

    def value(self, node: Node, like: Any, path: str) -> Any:
        """What a node stands for; `like` is what stands in its place now."""
        if not isinstance(node, dict):
            return node
        kind, at = node["is"], node.get("at")
        if kind == "kept":
            if like is None:
                raise self.owner.refuse(path, "neither data nor made when it is constructed")
            return like
        if kind == "same":
            return self._made[node["as"]]
        if kind == "tensor":
            made = self._tensor(node)
        elif kind == "packed":
            made = self._packed(node, path)
        elif kind in MAPPINGS:
            return self._mapping(node, like, path)
        elif kind in SEQUENCES or kind == "named":
            made = self._sequence(node, like, path)
        elif kind == "object":
            cls = self._class(node["class"], path, object)
            made = self._claim(like, cls)
            made = object.__new__(cls) if made is None else made
            self.fill(made, node["at"], node["of"], path)
        else:
            made = self._simple(node, kind, path) if at is None else self._rest(node, like, path)
        if at is not None:
            self._made[at] = made
        return made

    def fill(self, made: Any, at: int, nodes: Mapping[str, Node], path: str) -> None:
        """Set all attributes of an object, and remove those that were not saved."""
        self._made[at] = made
        now, values = attributes_of(made), {}
        for name, node in nodes.items():
            if node != KEPT:
                values[name] = self.value(node, now.get(name), f"{path}.{name}".lstrip("."))
            elif name in now:
                values[name] = now[name]

        def change() -> None:
            for name in attributes_of(made):
                if name not in values:
                    object.__delattr__(made, name)
            for name, value in values.items():
                object.__setattr__(made, name, value)

        self.changes.append(change)

    def _mapping(self, node: Node, like: Any, path: str) -> Any:
        cls = MAPPINGS[node["is"]]
        made = self._claim(like, cls)
        if made is None and cls is defaultdict:
            if "factory" not in node:
                raise self.owner.refuse(path, "a defaultdict of another kind than dict or list")
            made = defaultdict(FACTORIES[node["factory"]])
        elif made is None:
            made = cls()
        self._made[node["at"]] = made
        now, values = dict(made), {}
        for key_node, value_node in node["of"]:
            key = self.value(key_node, None, path)
            values[key] = self.value(value_node, now.get(key), f"{path}/{self._label(key)}")

        def change() -> None:
            made.clear()
            made.update(values)

        self.changes.append(change)
        return made

    def _sequence(self, node: Node, like: Any, path: str) -> Any:
        kind, nodes = node["is"], node["of"]
        now = [*like] if isinstance(like, list | tuple | deque) else []
        now += [None] * (len(nodes) - len(now))
        made: Any = None
        if kind in ("list", "set"):
            made = self._claim(like, SEQUENCES[kind])
            made = SEQUENCES[kind]() if made is None else made
            self._made[node["at"]] = made  # it may hold itself
        items = [self.value(n, now[i], f"{path}/{i}") for i, n in enumerate(nodes)]
        if kind == "list":
            self.changes.append(lambda: made.__setitem__(slice(None), items))
        elif kind == "set":
            self.changes += [made.clear, lambda: made.update(items)]
        elif kind == "named":
            return tuple.__new__(self._class(node["class"], path, tuple), items)
        else:
            return deque(items, node["most"]) if kind == "deque" else SEQUENCES[kind](items)
        return made

    def _simple(self, node: Node, kind: str, path: str) -> Any:
        if kind in ("param", "id", "address"):
            param = self._param(node["name"])
            if kind == "address":
                return param.data_ptr() + node["offset"]
            return param if kind == "param" else id(param)
        of = node["of"]
        if kind == "key":
            return tuple(self.value(part, None, path) for part in of)
        if kind == "number":
            return np.frombuffer(bytes.fromhex(of), node["dtype"])[0]
        if kind == "complex":
            return complex(*map(float, of))
        if kind == "dtype":
            return _dtype(of)
        if kind == "device":
            return self._device if of is None else torch.device(of)
        return float(of) if kind == "float" else torch.Size(of)

    def _rest(self, node: Node, like: Any, path: str) -> Any:
        """Names, and what draws random numbers."""
        kind, of = node["is"], node["of"]
        if kind == "method":
            owner = self._made[of]  # which need not have all of its attributes yet
            return getattr(type(owner), node["name"]).__get__(owner)
        if kind == "function":
            return self._function(node, like, path)
        if kind == "partial":
            return self._partial(node, like, path)
        if kind == "name":
            return self._named(of, path)
        if kind == "enum":
            return self._class(node["class"], path, enum.Enum)[of]
        state = self.value(of, None, path)
        if kind == "array":
            return state.numpy().copy(order="K")
        made: Any
        if kind == "generator":
            made = self._claim(like, torch.Generator) or torch.Generator()
            self.changes.append(lambda: made.set_state(state.cpu()))
        elif kind == "random":
            made = self._claim(like, random.Random) or random.Random()
            self.changes.append(lambda: made.setstate(state))
        elif kind == "numpy-random":
            made = self._claim(like, np.random.RandomState) or np.random.RandomState()
            self.changes.append(lambda: made.set_state(state))
        else:
            fresh = np.random.Generator(BITS[node["bits"]]())
            made = self._claim(like, np.random.Generator) or fresh
            self.changes.append(lambda: setattr(made.bit_generator, "state", state))
        return made

    def _function(self, node: Node, like: Any, path: str) -> Any:
        """The function that is there, and the variables around it as they were."""
        if not isinstance(like, FunctionType) or like.__qualname__ != node["name"]:
            raise self.owner.refuse(path, "a function that was not made when it is constructed")
        self._made[node["at"]] = like
        for cell, held, now in zip(like.__closure__ or (), node["of"], contents(like), strict=True):
            value = now if held == KEPT else self.value(held, now, path)
            self.changes.append(partial(setattr, cell, "cell_contents", value))
        return like

    def _partial(self, node: Node, like: Any, path: str) -> Any:
        now = {name: getattr(like, name, None) for name in node["of"]}
        parts = [self.value(part, now[name], path) for name, part in node["of"].items()]
        made: Any = self._claim(like, partial)
        made = partial(parts[0]) if made is None else made
        self.changes.append(lambda: made.__setstate__((*parts, vars(made) or None)))
        return made

    def _claim(self, like: Any, cls: type) -> Any:
        """What stands here now, to be filled anew; each object once, as two may become of it."""
        if type(like) is not cls or id(like) in self._claimed:
            return None
        self._claimed.add(id(like))
        return like

    def _named(self, name: str, path: str) -> Any:
        """A class or function of the owner's own: a file must not reach anything else by it."""
        found = found_by_name(name)
        inside = self.owner.defines(name.partition(":")[0])
        if not inside and not (isinstance(found, type) and self.owner.may_hold(found)):
            raise self.owner.refuse(path, f"of {name}, which its package does not define")
        if found is None:
            raise OptimError(
                f"the saved state of {self.owner.called} needs {name}, which its code does not "
                "have any more; use the version it was saved with"
            )
        if not isinstance(found, type | FunctionType) or name_of(found) != name:
            raise self.owner.refuse(path, f"{name}, which is no class or function of that name")
        return found

    def _class(self, name: str, path: str, kind: type) -> Any:
        """One that is a `kind`, which alone may be made of what a file says."""
        found = self._named(name, path)
        if not isinstance(found, type) or not issubclass(found, kind):
            raise self.owner.refuse(path, f"of {name}, which is no {kind.__name__}")
        return found

    def _label(self, key: Any) -> str:
        """A key for people: a parameter by its name, and nothing by its content."""
        if isinstance(key, Tensor):
            names = (name for name, param in self.owner.params.items() if param is key)
            return next(names, "tensor")
        return str(key)[:40] if isinstance(key, str | int | float) else type(key).__name__

    def _param(self, name: str) -> Tensor:
        if name not in self.owner.params:
            raise OptimError(
                f"the saved state of {self.owner.called} has a parameter {name} that it does not "
                "have here; use the model it was saved with"
            )
        return self.owner.params[name]

    def _tensor(self, node: Node) -> Tensor:
        where = node["where"]
        device = torch.device("cpu") if node.get("cpu") else self._device
        if "key" in where:
            value = self._stored(where["key"]).to(device, copy=True)
        else:
            if "param" in where:
                memory = self._param(where["param"]).untyped_storage()
            else:
                memory = self._bytes(where["bytes"], device)
            value = torch.empty(0, dtype=_dtype(where["dtype"]), device=memory.device)
            layout = where["offset"], where["size"], where["stride"]
            value.set_(memory, *layout)
        if node.get("parameter"):
            value = nn.Parameter(value, requires_grad=False)
        value.requires_grad_(bool(node.get("requires_grad")))
        for name, mark in node.get("marks", {}).items():
            setattr(value, name, self.value(mark, None, name))
        if "grad" in node:
            value.grad = self.value(node["grad"], None, "")
        return value

    def _packed(self, node: Node, path: str) -> Tensor:
        """A tensor of a kind of its own, such as one of 8 bits, by torch's rules for such kinds."""
        parts = {name: self.value(part, None, path) for name, part in node["parts"].items()}
        apart = _Reader(self.tensors, self.owner)  # all of it is new: it can be filled at once
        context = apart.value(node["context"], None, path)
        for change in apart.changes:
            change()
        make = self._class(node["class"], path, Tensor).__tensor_unflatten__
        made: Tensor = make(parts, context, torch.Size(node["size"]), tuple(node["stride"]))
        return made

    def _bytes(self, key: str, device: torch.device) -> torch.UntypedStorage:
        if key not in self._memory:
            self._memory[key] = self._stored(key).to(device, copy=True).untyped_storage()
        return self._memory[key]

    def _stored(self, key: str) -> Tensor:
        if key not in self.tensors:
            raise OptimError(
                f"the saved state of {self.owner.called} lacks {key}; restore the whole file"
            )
        return self.tensors[key]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
