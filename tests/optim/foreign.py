# ruff: noqa: ARG002
"""Optimizers as somebody else would write them: good ones, and one for everything that is refused.

Each is a plain torch.optim.Optimizer that knows nothing of this project.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


class Toy(torch.optim.Optimizer):
    """A step along what `direction` says, for every parameter that has a gradient."""

    def __init__(self, params: Any, lr: float = 0.01, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        assert weight.grad is not None
        return weight.grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(group["lr"] * self.direction(weight, group))


class SignMomentum(Toy):
    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.9) -> None:
        super().__init__(params, lr, beta=beta)

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[weight]
        mean = state.setdefault("mean", torch.zeros_like(weight))
        state["count"] = state.get("count", 0) + 1
        mean.lerp_(weight.grad, 1 - group["beta"])
        return torch.sign(mean)


class Rounded(Toy):
    """An argument that is no option of its param groups."""

    def __init__(self, params: Any, lr: float = 0.01, digits: int = 3) -> None:
        super().__init__(params, lr)
        self.digits = digits

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        assert weight.grad is not None
        return weight.grad.round(decimals=self.digits)


class Averaging(Toy):
    """Schedules itself: trains at a point between its average and where it would go; two modes."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, lr, beta=beta, k=0, total=0.0, training=False)

    def _blend(self, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] is training:
                continue
            group["training"] = training
            for weight in group["params"]:
                if "ahead" in self.state[weight]:
                    beta = group["beta"]
                    end = 1 - beta if training else 1 - 1 / beta
                    weight.data.lerp_(self.state[weight]["ahead"], end)

    def train(self) -> None:
        self._blend(True)

    def eval(self) -> None:
        self._blend(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("call train() before step()")
            group["k"] += 1
            group["total"] += group["lr"] ** 2
            share = group["lr"] ** 2 / group["total"]
            for weight in group["params"]:
                ahead = self.state[weight].setdefault("ahead", weight.clone())
                weight.lerp_(ahead, share)
                weight.add_(weight.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                ahead.sub_(weight.grad, alpha=group["lr"])


class AveragingAside(Toy):
    """The same with nothing in what torch calls its state."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.mode = "train"
        self.means: list[Tensor] = []

    def step(self, closure: Any = None) -> Any:
        super().step()
        weights = [w.detach() for group in self.param_groups for w in group["params"]]
        self.means = self.means or [weight.clone() for weight in weights]
        for mean, weight in zip(self.means, weights, strict=True):
            mean.lerp_(weight, 0.1)

    def eval(self) -> None:
        self._exchange("eval")

    def train(self) -> None:
        self._exchange("train")

    @torch.no_grad()
    def _exchange(self, mode: str) -> None:
        if mode == self.mode:
            return
        self.mode = mode
        weights = [w for group in self.param_groups for w in group["params"]]
        for mean, weight in zip(self.means, weights, strict=True):
            kept = mean.clone()
            mean.copy_(weight)
            weight.copy_(kept)


@dataclass
class Window:
    """An object of the package's own, as projectors are."""

    size: int
    held: list[Tensor] = field(default_factory=list)

    def mean(self, grad: Tensor) -> Tensor:
        self.held = [*self.held, grad.clone()][-self.size :]
        return torch.stack(self.held).mean(0)


class Trees(Toy):
    """State of many kinds: lists, tuples, objects, views, numbers; counters here and there."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr, calls=0)
        self.count, self.own = 0, random.Random(5)
        self.generator = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(1)
        self.recent: deque[float] = deque(maxlen=3)
        self.by_id: dict[int, int] = {}
        self.views: dict[Tensor, list[Tensor]] = {}
        self.by_address: dict[tuple[int, int], Tensor] = {}
        self.seen: set[str] = {"one", "two", "three", "four", "five"}
        self.function: Callable[[Tensor], Tensor] = lambda x: x  # which nobody can save
        self.buffer: Tensor | None = None

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        state, grad = self.state[weight], weight.grad
        assert grad is not None
        if not state:
            both = torch.zeros(2, *weight.shape)
            state |= {
                "pair": (both[0], [both[1].t() if weight.ndim == 2 else both[1]]),
                "window": Window(3),
                "half": torch.zeros_like(weight, dtype=torch.bfloat16),
                "complex": torch.zeros(2, dtype=torch.complex64),
                "empty": torch.zeros(0),
                "scale": np.float64(1.0),
                "worst": float("inf"),
                "what": "nothing yet",
            }
        group["calls"] += 1
        self.views[weight] = [weight.view(-1)[1:]]
        self.by_address[(weight.view(-1)[1:].data_ptr(), 1)] = weight
        self.count += 1
        self.by_id[id(weight)] = self.by_id.get(id(weight), 0) + 1
        first, [second] = state["pair"]
        first.lerp_(grad, 0.3)
        second.add_(1.0)
        state["half"].add_(grad)
        state["complex"].add_(1j * self.own.random())
        state["scale"] *= np.float64(0.99)
        state["worst"] = min(state["worst"], float(grad.abs().max()))
        self.recent.append(float(grad.sum()))
        self.buffer = torch.full((2,), float(self.count))
        noise = torch.rand((), generator=self.generator) + self.numpy.random()
        mean = state["window"].mean(grad) + state["half"].float() * state["complex"].imag.sum()
        return self.function(
            first
            + mean * noise * state["scale"]
            + second.reshape(weight.shape) * state["worst"] / self.by_id[id(weight)]
            + sum(self.recent) / self.count
        )


# What is refused.


class NeedsClosure(Toy):
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "give it a closure"


class SecondBackward(Toy):
    def step(self, closure: Any = None) -> Any:
        weight = self.param_groups[0]["params"][0]
        torch.autograd.grad(weight.grad.sum(), weight)


class Drawing(Toy):
    """By default from torch's own random numbers."""

    def __init__(self, params: Any, lr: float = 0.01, source: str = "torch") -> None:
        super().__init__(params, lr)
        self.source = source

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        draws: dict[str, Callable[[], Any]] = {
            "torch": lambda: torch.rand(()),
            "numpy": np.random.random,
            "python": random.random,
        }
        return super().direction(weight, group) * float(draws[self.source]())


class TouchingOthers(Toy):
    """Its class knows every parameter that was ever given to one of it, as registries do."""

    everyone: ClassVar[list[Tensor]] = []

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.everyone.extend(w for group in self.param_groups for w in group["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for weight in self.everyone:
            weight.mul_(0.99)


class SharedCount(Toy):
    steps: ClassVar[list[int]] = [0]

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        self.steps[0] += 1
        return super().direction(weight, group) / self.steps[0]


class Enclosed(Toy):
    """Counts where few look: in a closure."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        count = 0

        def counted() -> int:
            nonlocal count
            count += 1
            return count

        self.counted = counted

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        return super().direction(weight, group) / self.counted()


class Iterating(Toy):
    """How far an iterator has come shows nowhere, and only the thousandth step asks for it."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.steps = itertools.count()

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        return super().direction(weight, group) * (2 if next(self.steps) >= 1000 else 1)


class Elsewhere(Toy):
    """Counts in an object of no class of its own, and only the thousandth step asks for it."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.counts = SimpleNamespace(steps=0)

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        self.counts.steps += 1
        return super().direction(weight, group) * (2 if self.counts.steps >= 1000 else 1)


class Lately(Toy):
    """Notes something down long after any trial, in an object of no class of its own."""

    note: SimpleNamespace | None = None

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[weight]
        state["count"] = state.get("count", 0) + 1
        if state["count"] == 30:
            self.note = SimpleNamespace(norm=float(weight.norm()))
        return super().direction(weight, group) * (self.note.norm if self.note else 1.0)


class InItsClass(Toy):
    """Counts in its class, and only the thousandth step asks for it."""

    calls = 0

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        type(self).calls += 1
        return super().direction(weight, group) * (2 if self.calls >= 1000 else 1)


class Twice(Toy):
    """An option that is in its param groups, and in itself, from where it is read."""

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.9) -> None:
        super().__init__(params, lr, beta=beta)
        self.beta = beta

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        return super().direction(weight, group) * self.beta


class InnerSchedule(Toy):
    """Has a scheduler of torch's inside, which acts long after any trial."""

    def __init__(self, params: Any, lr: float = 0.01, every: int = 4) -> None:
        super().__init__(params, lr)
        self.schedule = torch.optim.lr_scheduler.StepLR(self, every, 0.5)

    def step(self, closure: Any = None) -> Any:
        super().step()
        self.schedule.step()


class OwnRate(Toy):
    """Takes its rate when it is made, where no schedule reaches it."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.rate = lr

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        return super().direction(weight, group).mul(self.rate / group["lr"])


class Decaying(Toy):
    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        group["lr"] *= 0.99
        return super().direction(weight, group)


class Setting(Toy):
    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        torch.set_default_dtype(torch.float64)
        return super().direction(weight, group)


class Failing(Toy):
    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        raise KeyError("momentum_buffer", weight.shape, len(group))


class Sparse(Toy):
    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        self.state[weight]["mean"] = torch.ones(2, 2).to_sparse()
        return super().direction(weight, group)


class Hooking(Toy):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for weight in group["params"]:
                weight.register_post_accumulate_grad_hook(lambda _: None)


class OptionsInGroups(Toy):
    """As some have it: the class takes parameters alone."""

    def __init__(self, params: Any) -> None:
        torch.optim.Optimizer.__init__(self, params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(group["factor"] * weight.grad)


class Asserting(OptionsInGroups):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            assert "kind" in group


class Swallowing(Toy):
    """Takes any argument and makes nothing of it."""

    def __init__(self, params: Any, lr: float = 0.01, **kwargs: Any) -> None:
        super().__init__(params, lr)


FILLED: dict[str, int] = {}


class FilledByAll(Toy):
    """Two of it share what its module keeps: each fills it once."""

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        FILLED.setdefault(str(tuple(weight.shape)), weight.numel())
        return super().direction(weight, group)


class ListOnly(Toy):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        assert all(isinstance(weight, Tensor) for weight in params)
        super().__init__(params, lr)


class ByRank(Toy):
    """Alike wherever it is tried out, and different on every rank."""

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return super().direction(weight, group) * (1 + rank)


class FailsOnOne(Toy):
    """Rank 1 alone fails, in its third step."""

    def direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[weight]
        state["count"] = state.get("count", 0) + 1
        if state["count"] == 3 and dist.is_initialized() and dist.get_rank() == 1:
            raise ValueError("no room here")
        return super().direction(weight, group)
