"""The state of somebody else's object as plain data: a tree for JSON and tensors; never a pickle.

`write` walks an object, an optimizer that we did not write, and everything it holds: containers,
numbers, texts, tensors, random generators, and objects of the classes that its own package defines.
`read` (untree.py) puts all of it into an object that was made anew, or into one that is in use.
Both keep what bits depend on: types, strides, memory that tensors share with each other or with a
parameter. Values of other kinds (functions, locks, what a compiler made) are left as the
constructor makes them; whether that is enough is not believed but tried out (probe.py) and watched
(traces.py). Of functions made by functions the variables around them are written, of partial ones
their parts; what gives one thing after the other, and does not show how far it is, is refused.

A node of the tree is a plain value, or {"is": kind, ...}; "at" numbers what may be held twice.
"""

from __future__ import annotations

import enum
import functools
import math
import random
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from speedrun.optim.errors import OptimError
from speedrun.optim.foreign.values import NATURAL, constant, tensor_problem
from speedrun.traces import METHODS, attributes_of, contents

Node = Any
KEPT: Node = {"is": "kept"}
HOOKS = re.compile("_optimizer_.*_hooks")
MAPPINGS: dict[str, type[dict[Any, Any]]] = {
    cls.__name__: cls for cls in (dict, OrderedDict, defaultdict, Counter)
}
SEQUENCES: dict[str, type] = {cls.__name__: cls for cls in (list, tuple, set, frozenset, deque)}
NOBODYS = {"torch", "builtins", "abc", "typing", "functools"}
FACTORIES: dict[str, type] = {cls.__name__: cls for cls in (dict, list, set, int, float)}


@dataclass(frozen=True)
class Owner:
    """Whose state it is: its parameters by name, and the packages that define its classes."""

    params: Mapping[str, Tensor]
    packages: frozenset[str]
    called: str

    @staticmethod
    def of(root: object, params: Mapping[str, Tensor], make: object, called: str = "") -> Owner:
        """A function that makes one may put things of its own module into it."""
        modules = [cls.__module__ for cls in type(root).__mro__]
        modules.append(str(getattr(make, "__module__", "torch")))
        roots = {module.partition(".")[0] for module in modules} - NOBODYS
        return Owner(params, frozenset(roots), called)

    def defines(self, module: str) -> bool:
        return module.partition(".")[0] in self.packages

    def may_hold(self, cls: type) -> bool:
        """Whether objects of this class are looked into, and made again from what is saved."""
        torchs = cls.__module__.partition(".")[0] == "torch"
        usual = issubclass(cls, Optimizer) or (torchs and issubclass(cls, LRScheduler | nn.Module))
        return usual or self.defines(cls.__module__)

    def refuse(self, path: str, what: str) -> OptimError:
        return OptimError(
            f"{self.called} cannot be saved exactly: its {path} is {what}; keep tensors, numbers "
            "and texts in its state"
        )


@dataclass
class Written:
    """A tree and the tensors that it names: the live ones, which whoever saves them copies."""

    tree: dict[str, Node]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, object] = field(default_factory=dict)  # by path: what is not in the tree
    functions: frozenset[str] = frozenset()  # paths of those of which the tree has the variables


def write(root: object, owner: Owner, label: str, beside: Mapping[str, Any]) -> Written:
    """Everything that `root` holds; tensors of a parameter's state are called 'name:path'.

    `label` begins the names of all other tensors. What is `beside` the object is written with it.
    """
    writer = _Writer(owner, label)
    writer.number(root)
    tree = {
        "root": writer.attributes(root, ""),
        "beside": {key: writer.node(value, key) for key, value in beside.items()},
    }
    writer.name_tensors()
    return Written(tree, writer.tensors, writer.kept, frozenset(writer.functions))


def tensor_keys(tree: Node) -> Iterator[str]:
    """The names of all tensors that a tree needs."""
    if isinstance(tree, dict):
        where = tree.get("where")
        if tree.get("is") == "tensor" and isinstance(where, dict):
            yield from (where[key] for key in ("key", "bytes") if key in where)
    held = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    for node in held:
        yield from tensor_keys(node)


def where_apart(left: Node, right: Node, path: str = "") -> str:
    """The path of the first thing in which two trees differ."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key, held in left.items():
            if held != right.get(key):
                inside = "is" in left and key == "of"
                return where_apart(held, right.get(key), path if inside else f"{path}.{key}")
    elif isinstance(left, list) and isinstance(right, list):
        for number, (one, other) in enumerate(zip(left, right, strict=False)):
            if one == other:
                continue
            of_mapping = isinstance(one, list) and isinstance(other, list) and one[0] == other[0]
            if not of_mapping:
                return where_apart(one, other, f"{path}/{number}")
            key = one[0].get("name", number) if isinstance(one[0], dict) else one[0]
            return where_apart(one[1], other[1], f"{path}/{key}")
    return path.lstrip(".")


def found_by_name(name: str) -> Any:
    """What a loaded module holds under 'module:name'; None if nothing."""
    module, _, qualname = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in qualname.split("."):
        value = getattr(value, part, None)
    return value


def name_of(value: Any) -> str:
    return f"{value.__module__}:{value.__qualname__}"


class _Writer:
    def __init__(self, owner: Owner, label: str) -> None:
        self.owner, self.label = owner, label
        self.tensors: dict[str, Tensor] = {}
        self.kept: dict[str, object] = {}
        self.functions: set[str] = set()
        self._ids = {id(param): name for name, param in owner.params.items()}
        self._memory = {p.untyped_storage()._cdata: name for name, p in owner.params.items()}
        self._numbers: dict[int, int] = {}
        self._left: set[int] = set()  # what is left as the constructor makes it
        self._alive: list[object] = []  # so that no id is used twice
        self._found: list[tuple[Tensor, dict[str, Node], str]] = []

    def number(self, value: object) -> int:
        self._alive.append(value)
        return self._numbers.setdefault(id(value), len(self._numbers))

    def attributes(self, value: object, path: str) -> dict[str, Node]:
        return {
            name: self._hooks(held, f"{path}.{name}".lstrip("."))
            if isinstance(value, Optimizer) and HOOKS.fullmatch(name)
            else self.node(held, f"{path}.{name}".lstrip("."))
            for name, held in attributes_of(value).items()
        }

    def _hooks(self, held: object, path: str) -> Node:
        """Torch numbers them over the whole process; they stay those that its constructor set."""
        self.kept[path] = held
        return KEPT

    def node(self, value: Any, path: str) -> Node:
        cls = type(value)
        if value is None or cls in (bool, str):
            return value
        if cls is int:
            return self._pointer(value) or value
        if cls is float:
            return value if math.isfinite(value) else {"is": "float", "of": str(value)}
        simple = constant(value) or self._device(value)
        if simple is not None:
            return simple
        if id(value) in self._ids:
            return {"is": "param", "name": self._ids[id(value)]}
        if id(value) in self._left:
            self.kept[path] = value
            return KEPT
        if id(value) in self._numbers:
            return {"is": "same", "as": self._numbers[id(value)]}
        at = self.number(value)
        if isinstance(value, Tensor):
            return {"at": at, **self._tensor(value, path)}
        node = self._container(value, path) or self._generator(value, path)
        node = node or self._object(value, path)
        if node:
            return {"at": at, **node}
        of = value.__self__ if isinstance(value, METHODS) else value  # as in count().__next__
        if isinstance(of, Iterator | AsyncIterator):
            what = f"a {type(of).__name__}, of which nobody can tell its place"
            raise self.owner.refuse(path, what)
        self._left.add(id(value))
        self.kept[path] = value
        return KEPT

    def _device(self, value: Any) -> Node:
        """That of its parameters has no name: on another rank it is another one."""
        if not isinstance(value, torch.device):
            return None
        own = next(iter(self.owner.params.values())).device
        return {"is": "device", "of": None if value == own else str(value)}

    def _container(self, value: Any, path: str) -> Node:
        cls = type(value)
        kind = getattr(cls, "written_as", cls.__name__)
        if MAPPINGS.get(kind) is cls or (kind in MAPPINGS and hasattr(cls, "written_as")):
            pairs = [
                [self._key(key, path), self.node(held, self._below(path, key))]
                for key, held in dict.items(value)  # not through methods of a class of its own
            ]
            factory = getattr(getattr(value, "default_factory", None), "__name__", "")
            made_by = {"factory": factory} if factory in FACTORIES else {}
            return {"is": kind, "of": pairs, **made_by}
        named = isinstance(value, tuple) and hasattr(value, "_fields") and self.owner.may_hold(cls)
        if cls in SEQUENCES.values() or named:
            # The order of a set is another one in another process.
            unordered = isinstance(value, set | frozenset)
            ordered = sorted(value, key=self._order) if unordered else value
            items = [self.node(item, f"{path}/{i}") for i, item in enumerate(ordered)]
            if named:
                return {"is": "named", "class": name_of(cls), "of": items}
            most = {"most": value.maxlen} if isinstance(value, deque) else {}
            return {"is": kind, "of": items, **most}
        return None

    def _generator(self, value: Any, path: str) -> Node:
        """Arrays of numpy, and what draws random numbers."""
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            kind, held = "array", torch.from_numpy(value.copy(order="K"))
        elif isinstance(value, torch.Generator):
            kind, held = "generator", value.get_state()
        elif type(value) is random.Random:
            kind, held = "random", value.getstate()  # type: ignore[assignment]
        elif isinstance(value, np.random.RandomState):
            kind, held = "numpy-random", value.get_state(legacy=False)  # type: ignore[assignment]
        elif isinstance(value, np.random.Generator):
            kind, held = "numpy-generator", value.bit_generator.state  # type: ignore[assignment]
            bits = {"bits": type(value.bit_generator).__name__}
            return {"is": kind, "of": self.node(held, path), **bits}
        else:
            return None
        return {"is": kind, "of": self.node(held, path)}

    def _object(self, value: Any, path: str) -> Node:
        cls, owner = type(value), self.owner
        of_written = isinstance(value, MethodType) and id(value.__self__) not in self._left
        if of_written and id(value.__self__) in self._numbers:
            return {"is": "method", "of": self._numbers[id(value.__self__)], "name": value.__name__}
        if isinstance(value, type | FunctionType):
            inside = owner.defines(str(value.__module__))
            known = found_by_name(name_of(value)) is value
            if inside and known:
                return {"is": "name", "of": name_of(value)}
            if known or isinstance(value, type) or not value.__closure__:
                return None
            names = value.__code__.co_freevars
            held = zip(names, contents(value), strict=True)
            around = [self.node(one, f"{path}.{name}") for name, one in held]
            self.functions.add(path)
            return {"is": "function", "name": value.__qualname__, "of": around}
        if cls is functools.partial:
            parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
            made_of = {name: self.node(part, f"{path}/{name}") for name, part in parts.items()}
            return {"is": "partial", "of": made_of}
        if not owner.may_hold(cls) or found_by_name(name_of(cls)) is not cls:
            return None
        if isinstance(value, enum.Enum):
            return {"is": "enum", "class": name_of(cls), "of": value.name}
        if isinstance(value, dict | list | tuple | set | frozenset):
            return None  # with items of its own beside its attributes
        return {"is": "object", "class": name_of(cls), "of": self.attributes(value, path)}

    def _key(self, key: Any, path: str) -> Node:
        """Of a mapping."""
        if type(key) is tuple:
            return {"is": "key", "of": [self._key(part, path) for part in key]}
        node = self.node(key, path)
        if node is KEPT:
            raise self.owner.refuse(path, f"a mapping by {type(key).__name__}")
        return node

    def _pointer(self, value: int) -> Node:
        """A number that tells a parameter, which has another one in another process."""
        if value in self._ids:
            return {"is": "id", "name": self._ids[value]}
        if place := self._place(value):
            return {"is": "address", "name": place[0], "offset": place[1]}
        return None

    def _order(self, item: Any) -> str:
        """What items of a set are sorted by, alike in every process."""
        if isinstance(item, Tensor):
            return self._ids.get(id(item), "")
        return repr(self._pointer(item) or item) if type(item) is int else repr(item)

    def _place(self, address: int) -> tuple[str, int] | None:
        """The parameter in whose memory an address lies, and where in it."""
        for name, param in self.owner.params.items():
            offset = address - param.data_ptr()
            if 0 <= offset < param.nbytes:
                return name, offset
        return None

    def _below(self, path: str, key: Any) -> str:
        if isinstance(key, Tensor):
            name = self._ids.get(id(key), "tensor")
            return f"{name}:" if path == "state" else f"{path}/{name}"
        if type(key) is int:
            key = self._ids.get(key) or (self._place(key) or [key])[0]
        part = str(key) if isinstance(key, str | int | float) else type(key).__name__
        return f"{path}{part}" if path.endswith(":") else f"{path}/{part}"

    # Tensors. One that has its memory alone is written as it is, any other with its memory.

    def _tensor(self, value: Tensor, path: str) -> Node:
        if hasattr(value, "__tensor_flatten__") and self.owner.may_hold(type(value)):
            names, context = value.__tensor_flatten__()
            parts = {name: self.node(getattr(value, name), f"{path}.{name}") for name in names}
            layout = {"size": list(value.size()), "stride": list(value.stride())}
            made_of = {"parts": parts, "context": self.node(context, path), **layout}
            return {"is": "packed", "class": name_of(type(value)), **made_of}
        problem = tensor_problem(value)
        if problem:
            raise self.owner.refuse(path, problem)
        node: dict[str, Node] = {"is": "tensor"}
        # What gradients know of a view of a parameter is torch's own, and may not be asked for.
        of_its_own = value.untyped_storage()._cdata not in self._memory
        if of_its_own and value.grad_fn is not None:
            raise self.owner.refuse(path, "a tensor that holds the graph of its gradient")
        if of_its_own and value.requires_grad:
            node["requires_grad"] = True
        if isinstance(value, nn.Parameter):
            node["parameter"] = True
        if vars(value):  # what somebody wrote onto it
            marks = {name: self.node(one, f"{path}.{name}") for name, one in vars(value).items()}
            node["marks"] = {name: one for name, one in marks.items() if one != KEPT}
        if value.device.type == "cpu" and any(p.is_cuda for p in self.owner.params.values()):
            node["cpu"] = True
        # The same dict is completed by `name_tensors`.
        node["where"] = {}
        self._found.append((value, node["where"], path))
        if of_its_own and value.grad is not None:
            node["grad"] = self.node(value.grad, f"{path}.grad")
        return node

    def name_tensors(self) -> None:
        """Now that it is known which tensors share memory."""
        users = Counter(value.untyped_storage()._cdata for value, _, _ in self._found)
        written: dict[int, str] = {}
        for value, where, path in self._found:
            storage = value.untyped_storage()
            memory = storage._cdata
            alone = users[memory] == 1 and memory not in self._memory
            if alone and value.is_contiguous() and value.dtype in NATURAL:
                where["key"] = self._keep(value, path)
                continue
            where |= {
                "dtype": str(value.dtype).removeprefix("torch."),
                "offset": value.storage_offset(),
                "size": list(value.size()),
                "stride": list(value.stride()),
            }
            if memory in self._memory:
                where["param"] = self._memory[memory]
                continue
            if memory not in written:
                whole = torch.empty(0, dtype=torch.uint8, device=value.device)
                whole.set_(storage)
                written[memory] = self._keep(whole, path)
            where["bytes"] = written[memory]

    def _keep(self, tensor: Tensor, path: str) -> str:
        of_param = path.partition(":")[0] in self.owner.params
        name = wanted = path if of_param else f"{self.label}:{path}"
        count = 1
        while name in self.tensors:
            count += 1
            name = f"{wanted}~{count}"
        self.tensors[name] = tensor.detach()
        return name
