"""What code of a user's own keeps where no checkpoint looks: found out by looking at it twice.

`trace` sums up all that is in sight of a value: attributes, items, memory, what a function has in
its closure and defaults. If it changes from step to step, there is state in it. `outside_of` lists
what classes and modules hold, which belongs to no object at all. What nothing shows (the cache of
an `lru_cache`, a file) is not found.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Into these nobody looks: they change by themselves, and hold no state of somebody's own.
LEFT_ALONE = ("logging", "threading", "_thread", "weakref", "concurrent", "torch", "warnings")
BUT = ("torch.optim", "torch.nn", "torch.amp")
MOST = 20_000  # things that are looked at
PLAIN = bool | int | float | complex | str | bytes
DATA = (int, float, complex, str, bytearray, list, dict, set, deque, Tensor, np.ndarray,
        np.random.Generator, np.random.RandomState, random.Random, torch.Generator)  # fmt: skip
METHODS = (MethodType, BuiltinFunctionType, MethodWrapperType)
ADDRESS = re.compile(r"0x[0-9a-f]+")


def trace(value: object, known: Mapping[int, str] | None = None) -> str:
    """A digest of what is in sight of a value; `known` are things that are left aside, by id."""
    tracer = _Tracer(known or {})
    tracer.look(value)
    return tracer.digest.hexdigest()


def holds_data(value: object) -> bool:
    """Whether there may be state in a value: one made late would have to be brought back.

    Of a function, what it has around it and its defaults; those that torch makes are torch's own.
    """
    if isinstance(value, threading.local):
        return True
    if isinstance(value, FunctionType):
        if (value.__module__ or "").partition(".")[0] in LEFT_ALONE:
            return False
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return any(isinstance(one, DATA) for one in (*defaults, *contents(value)))
    if isinstance(value, functools.partial):
        return any(isinstance(one, DATA) for one in (*value.args, *value.keywords.values()))
    is_code = callable(value) or isinstance(value, ModuleType)
    return not is_code and not _left_alone(type(value))


def outside_of(made: object, defines: frozenset[str]) -> dict[str, object]:
    """What the classes and modules hold that an object or function is written in, by name.

    `defines` are the packages that are looked into: no others are the user's own.
    """
    cls = made if isinstance(made, type) else type(made)
    written_in = [made] if isinstance(made, FunctionType) else [*cls.__mro__]
    found: dict[str, object] = {}
    for one in written_in:
        if one.__module__.partition(".")[0] not in defines or one.__module__ not in sys.modules:
            continue
        places = {one.__module__: vars(sys.modules[one.__module__])}
        if isinstance(one, type):
            places[one.__qualname__] = dict(vars(one))
        for place, held in places.items():
            for name, value in [*held.items()]:
                own = isinstance(value, FunctionType) and value.__module__ == one.__module__
                if not name.startswith("__") and (own or isinstance(value, DATA)):
                    found[f"{place.rpartition('.')[2]}.{name}"] = value
    return found


def as_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().reshape(-1)
    if flat.numel() < 2:  # its stride may be 0, and is taken for contiguous all the same
        flat = flat.new_empty(flat.numel()).copy_(flat)
    return flat.view(torch.uint8)


def attributes_of(value: object) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):  # as Python calls a private one
                name = f"_{cls.__name__.lstrip('_')}{name}"
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def contents(function: FunctionType) -> list[Any]:
    """The variables of the functions around one that was made in them; None: it is not set yet."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(None)
    return found


class _Tracer:
    def __init__(self, known: Mapping[int, str]) -> None:
        self.digest = hashlib.sha256()
        self._known, self._seen = known, dict[int, int]()
        self._alive: list[object] = []  # so that no id is used twice

    def look(self, value: Any) -> None:
        if value is None or isinstance(value, PLAIN):
            self._say(f"{type(value).__name__} {value!r}")
        elif id(value) in self._known:
            self._say(f"of it {self._known[id(value)]}")
        elif id(value) in self._seen:
            self._say(f"again {self._seen[id(value)]}")
        elif len(self._seen) < MOST:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
            self._say(type(value).__qualname__)
            with suppress(Exception):  # whatever does not want to be looked at
                self._inside(value)

    def _inside(self, value: Any) -> None:
        parts = [*self._parts(value)]
        for part in parts:
            self.look(part)
        named = isinstance(value, type | ModuleType | CodeType)  # by which they are known
        if named or (_left_alone(type(value)) and type(value).__name__ != "_local"):
            return
        held = attributes_of(value)
        for name, one in held.items():
            self.look(name)
            self.look(one)
        if not parts and not held and not callable(value):  # a Decimal shows its text alone
            self._say(ADDRESS.sub("", repr(value)))

    def _parts(self, value: Any) -> Iterator[Any]:
        if isinstance(value, Tensor):
            yield f"{value.dtype} {tuple(value.shape)}"
            yield as_bytes(value.detach().cpu()).numpy().tobytes()
        elif isinstance(value, torch.Generator):
            yield value.get_state()
        elif isinstance(value, random.Random):
            yield repr(value.getstate())
        elif isinstance(value, type | ModuleType | CodeType):
            yield getattr(value, "__qualname__", getattr(value, "__name__", ""))
        elif isinstance(value, FunctionType):
            yield from (value.__qualname__, value.__defaults__, value.__kwdefaults__)
            yield from contents(value)
        elif isinstance(value, METHODS):
            yield value.__qualname__
            if not isinstance(value.__self__, ModuleType):
                yield value.__self__
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, Mapping):
            yield from (part for pair in value.items() for part in pair)
        elif isinstance(value, Set):
            yield from sorted(value, key=repr)
        elif isinstance(value, list | tuple | deque):
            yield from value
        else:
            with suppress(TypeError):  # what shows its memory: arrays, of numpy, Python and C
                yield bytes(memoryview(value))

    def _say(self, what: str) -> None:
        self.digest.update(f"{what}\n".encode("utf-8", "surrogatepass"))


def _left_alone(cls: type) -> bool:
    inside = cls.__module__.partition(".")[0] in LEFT_ALONE
    return inside and not cls.__module__.startswith(BUT) and not issubclass(cls, nn.Module)
