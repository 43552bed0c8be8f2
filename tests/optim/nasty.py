# ruff: noqa: ARG002
"""Optimizers that keep their state where few look, or do what an optimizer must not.

What each keeps acts in the thousandth step alone: no trial could see it do something else. Those of
`GOOD` are brought back all the same, all others are refused for what `REFUSED` says.
"""

from __future__ import annotations

import array
import ctypes
import functools
import itertools
import sys
import threading
import time
from decimal import Decimal
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tests.optim.foreign import Toy

COUNTS: dict[int, int] = {}


class Late(Toy):
    """`count` counts steps somewhere."""

    def count(self, weight: Tensor) -> float:
        raise NotImplementedError

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        late = self.count(weight) >= 1000
        return super().direction(weight, group) * (2 if late else 1)


class HookStep(Toy):
    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        if not self.state[weight]:
            self.state[weight]["seen"] = True
            weight.register_hook(lambda grad: grad * 2)  # type: ignore[no-untyped-call]
        return super().direction(weight, group)


class Double(Toy):
    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        found = super().direction(weight, group)
        weight.data = weight.data.double()
        return found


class Frozen(Toy):
    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        weight.requires_grad_(False)
        return super().direction(weight, group)


class Cut(Toy):
    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data = weight.data[:1]


class InDecimal(Late):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.steps = Decimal(0)

    def count(self, weight: Tensor) -> float:
        self.steps += 1
        return float(self.steps)


class InArray(Late):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.steps = array.array("d", [0.0])

    def count(self, weight: Tensor) -> float:
        self.steps[0] += 1
        return self.steps[0]


class InBytes(Late):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.steps = bytearray(8)

    def count(self, weight: Tensor) -> float:
        self.steps[:] = (int.from_bytes(self.steps) + 1).to_bytes(8)
        return int.from_bytes(self.steps)


class InC(Late):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.steps = ctypes.c_long(0)

    def count(self, weight: Tensor) -> float:
        self.steps.value += 1
        return self.steps.value


class InThread(Late):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.mine = threading.local()
        self.mine.steps = 0

    def count(self, weight: Tensor) -> float:
        self.mine.steps += 1
        return float(self.mine.steps)


class NextOfCount(Late):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.tick = itertools.count(1).__next__

    def count(self, weight: Tensor) -> float:
        return self.tick()


class InModule(Late):
    def count(self, weight: Tensor) -> float:
        COUNTS[id(weight)] = COUNTS.get(id(weight), 0) + 1
        return COUNTS[id(weight)]


class InDefault(Late):
    def count(self, weight: Tensor, steps: list[int] = [0]) -> float:  # noqa: B006
        steps[0] += 1
        return steps[0]


def counted() -> int:
    counted.steps = getattr(counted, "steps", 0) + 1  # type: ignore[attr-defined]
    return counted.steps  # type: ignore[attr-defined, no-any-return]


class InFunction(Late):
    def count(self, weight: Tensor) -> float:
        return counted()


class Exits(Toy):
    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        sys.exit("enough")


class BadError(Toy):
    class UnspeakableError(Exception):
        def __str__(self) -> str:
            raise ValueError

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        raise self.UnspeakableError


class Huge(Toy):
    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        self.state[weight]["number"] = 10**5000
        return super().direction(weight, group)


class Denormal(Toy):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.seen = 0

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        return super().direction(weight, group)


class InList(Toy):
    """A function in its state: no attribute that comes by itself when it is needed again."""

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        self.state[weight].setdefault("f", lambda x: x)
        return super().direction(weight, group)


class OnTensor(Toy):
    """A number written onto a tensor of its state."""

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
        mean.steps = steps = getattr(mean, "steps", 0) + 1
        return super().direction(weight, group) / float(steps)


class Private:
    __slots__ = ("__steps",)

    def __init__(self) -> None:
        self.__steps = 0

    def next(self) -> int:
        self.__steps += 1
        return self.__steps


class InSlots(Toy):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.counter = Private()

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        return super().direction(weight, group) / self.counter.next()


class ByColumns(Toy):
    """Sums go along memory, so an array that comes back with other strides sums otherwise."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.values = np.asfortranarray(np.random.default_rng(0).random((40, 30), dtype="f4"))

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        self.values *= np.float32(1.0001)
        assert self.values.flags.f_contiguous
        return super().direction(weight, group) * float(self.values.sum())


class Counter(dict[str, int]):  # as one of Python's own is called
    def tick(self) -> int:
        self["steps"] = self.get("steps", 0) + 1
        return self["steps"]


class Namesake(Late):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.counter = Counter()

    def count(self, weight: Tensor) -> float:
        return self.counter.tick()


class Pointers(Toy):
    """Numbers of its parameters, which are others in another process, in a set and a list."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.seen: set[int] = set()
        self.places: list[int] = []

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        factor = 1.0 if id(weight) in self.seen and weight.data_ptr() in self.places else 0.1
        if id(weight) not in self.seen:
            self.places.append(weight.data_ptr())
        self.seen.add(id(weight))
        return factor * super().direction(weight, group)


class StepHook(Toy):
    """Torch keeps such hooks by a number that it counts over the whole process."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.count = 0
        self.register_step_pre_hook(lambda one, *_: setattr(one, "count", one.count + 1))

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        return super().direction(weight, group) / self.count


class Remembered(Toy):
    """A method of a part, held before the part has what the method reads."""

    class Part:
        def __init__(self) -> None:
            self.call = self.scaled
            self.factor = 1.0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.rest, name)  # without an end, where `rest` is not set yet

        def scaled(self) -> float:
            self.factor *= 0.9
            return self.factor

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.part = self.Part()
        self.part.rest = 0  # type: ignore[attr-defined]

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        return super().direction(weight, group) * self.part.call()


def around(params: Any, lr: float = 0.01) -> torch.optim.Optimizer:
    """A function may put things of its own file into somebody else's class."""
    made = torch.optim.SGD(params, lr=lr)
    made.private = Private()  # type: ignore[attr-defined]

    @torch.no_grad()
    def slower(one: torch.optim.Optimizer, *_: Any) -> None:
        for group in one.param_groups:
            for weight in group["params"]:
                weight.grad.div_(one.private.next())  # type: ignore[attr-defined]

    made.register_step_pre_hook(slower)
    return made


class TwoNames(Toy):
    """What no tree has, under two names and twice in a list."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.one = self.other = torch.sign
        self.both = [threading.Lock()] * 2

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        return self.one(super().direction(weight, group))


class OneNumber(Toy):
    """Its stride is 0, and that of none may be, too."""

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        found = super().direction(weight, group)
        norm = found.norm().expand(1)
        mean = self.state[weight].setdefault("mean", norm)
        self.state[weight]["mean"] = (0.9 * mean[0] + 0.1 * norm[0]).expand(1)
        self.state[weight]["rates"] = np.repeat(0.1 * float(norm), 1)
        self.state[weight]["none"] = np.repeat(0.1, 0)
        found /= self.state[weight]["mean"] + self.state[weight]["rates"][0]
        return found


class Patient(Toy):
    """Every 16th step moves the weights, by the mean of all gradients since."""

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[weight]
        state["seen"] = state.get("seen", 0) + 1
        state["sum"] = state.get("sum", 0) + super().direction(weight, group)
        if state["seen"] % 16:
            return torch.zeros_like(weight)
        mean: Tensor = state.pop("sum") / 16
        return mean


GOOD = (
    TwoNames,
    OneNumber,
    Patient,
    OnTensor,
    InSlots,
    ByColumns,
    Pointers,
    StepHook,
    Remembered,
    around,
)


class Clock(Toy):
    """Of no use to any weight."""

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        self.told = {"at": time.perf_counter()}
        return super().direction(weight, group)


class Ordered(Toy):
    """The order of a set is that of its memory."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.seen: set[int] = set()

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        self.seen.add(8 * (7 - len(self.seen)) if len(self.seen) < 7 else 0)
        first = next(iter(self.seen))
        return super().direction(weight, group) * (1 + first)


class Anchored(Toy):
    """What is made late enough, no trial sees."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.steps = 0

    def keep(self, weights: dict[int, Tensor]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 30:
            weights = [p for group in self.param_groups for p in group["params"]]
            self.keep({id(p): p.clone() for p in weights})
        super().step()


class InALambda(Anchored):
    def keep(self, weights: dict[int, Tensor]) -> None:
        self.anchor = lambda p, held=weights: held[id(p)]


class InAPartial(Anchored):
    def keep(self, weights: dict[int, Tensor]) -> None:
        self.anchor = functools.partial(dict.get, weights)


class InAThread(Anchored):
    def keep(self, weights: dict[int, Tensor]) -> None:
        self.mine = threading.local()
        self.mine.held = weights


HELD: dict[int, Tensor] = {}


class InTheModule(Anchored):
    def keep(self, weights: dict[int, Tensor]) -> None:
        HELD.update(weights)


LATE: dict[type[Toy], str] = {
    InALambda: "its anchor is a function that was made in a step",
    InAPartial: r"its anchor/func is a method_descriptor that was made in a step",
    InAThread: "its mine is a _local that was made in a step",
    InTheModule: r"changes nasty\.HELD from step to step",
}
CHANGES = "that changes from step to step"
REFUSED: ClassVar[dict[type[Toy], str]] = {  # type: ignore[misc]
    HookStep: r"makes of parameter up\.weight, .*with 1 hooks into the backward pass",
    Double: r"makes of parameter up\.weight, float32 .* one that is float64 of shape",
    Frozen: "one that is float32 .*, without gradient; an optimizer may change the values",
    Cut: r"one that is float32 of shape \(1, ",
    InDecimal: f"its steps is a Decimal {CHANGES}",
    InArray: f"its steps is a array {CHANGES}",
    InBytes: f"its steps is a bytearray {CHANGES}",
    InC: f"its steps is a c_long {CHANGES}",
    InThread: f"its mine is a _local {CHANGES}",
    NextOfCount: "its tick is a count, of which nobody can tell its place",
    InModule: r"changes nasty\.COUNTS from step to step, which belongs to its class or module",
    InDefault: r"changes InDefault\.count from step to step",
    InFunction: r"changes nasty\.counted from step to step",
    Exits: r"failed in step\(\): SystemExit: enough \(line \d+ of nasty\.py\)",
    BadError: r"failed in step\(\): UnspeakableError: raise self\.UnspeakableError \(line",
    Huge: "cannot be saved exactly: ValueError: Exceeds the limit",
    Denormal: r"calls torch\.backends\.mkldnn\.enabled in a step, which changes how the model",
    InList: r"its up\.weight:f is a function that was made in a step",
    Clock: "does not come back exactly: its told/at differs after more steps",
    Ordered: "or it is the order of a set or memory that an array shares with a tensor",
    Namesake: f"its counter is a Counter {CHANGES}",
}
