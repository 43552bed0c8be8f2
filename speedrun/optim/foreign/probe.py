"""Trying out somebody else's optimizer before a run depends on it.

On small stand-ins of the parameters several of it take steps with the same made-up gradients. One
goes on, one is saved and loaded on the way, one is taken back to what was saved: all must come to
the same bits, which also shows state that it keeps outside itself, as two of it would share that.
What is refused is refused in a sentence, before anything was trained.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from speedrun.optim.errors import OptimError
from speedrun.optim.foreign.compiler import uncompiled
from speedrun.optim.foreign.make import Members, Use, refuse_unread
from speedrun.optim.foreign.tree import where_apart
from speedrun.optim.foreign.values import same_bits
from speedrun.optim.foreign.wrap import Foreign

LONGEST = 24  # side of a stand-in
NUMBERS = 4096  # of the one that stands for the largest
STEPS = 12  # before and after it is saved; what happens every tenth step happens in both
PATIENT = 100  # steps in which one has to move at all
REAL_STEPS = 3  # where stand-ins are as large as the parameters
SEED = 2718

Shape = tuple[int, ...]


def probe(use: Use, members: Members) -> None:
    """Raise an OptimError if a run could not trust this optimizer with these parameters."""
    with _unheard(), uncompiled():
        try:
            _Trial(use, _stand_ins(members, small=True), STEPS).run()
        except _FailedError as small:
            # It may need larger matrices than the stand-ins are: then those it will have decide.
            try:
                _Trial(use, _stand_ins(members, small=False), REAL_STEPS).run()
            except (OptimError, _FailedError):
                raise small.error from small.error.__cause__


class _FailedError(Exception):
    def __init__(self, error: OptimError) -> None:
        self.error = error


@contextmanager
def _unheard() -> Iterator[None]:
    """Some print tables when they are made, and here many are made."""
    with redirect_stdout(io.StringIO()):
        yield


def _stand_ins(members: Members, *, small: bool) -> dict[str, list[tuple[str, Tensor]]]:
    """For every kind of shape in a role one tensor, under the name of the first that has it."""
    found: dict[str, list[tuple[str, Tensor]]] = {}
    for role, group in members.items():
        largest = max((param for _, param in group), key=lambda param: param.numel())
        kinds: dict[Any, str] = {}
        for name, param in group:
            shape = tuple(param.shape)
            if small:
                shape = _large(shape) if param is largest else _small(shape)
            kinds.setdefault((shape, param.dtype, param.device), name)
        found[role] = [
            (name, torch.empty(shape, dtype=dtype, device=device))
            for (shape, dtype, device), name in kinds.items()
        ]
    return found


def _small(shape: Shape) -> Shape:
    """The same number of sides with about the same proportions, the longest at most LONGEST."""
    longest = max(shape, default=1)
    if longest <= LONGEST:
        return shape
    return tuple(min(side, max(4, round(side * LONGEST / longest))) for side in shape)


def _large(shape: Shape) -> Shape:
    """With NUMBERS or more: some keep the state of a small tensor in another form."""
    if math.prod(shape) <= NUMBERS:
        return shape
    factor = (NUMBERS / math.prod(shape)) ** (1 / len(shape))
    return tuple(min(side, 16 * math.ceil(side * factor / 16)) for side in shape)


@dataclass
class _Copy:
    """One instance of the optimizer with stand-ins of its own."""

    foreign: Foreign
    weights: list[Tensor]

    def same(self, other: _Copy) -> bool:
        return all(map(same_bits, self.weights, other.weights))


class _Trial:
    def __init__(self, use: Use, likes: Members, steps: int) -> None:
        self.use, self.likes, self.steps = use, likes, steps
        self.called = use.named(list(likes))
        self.bystander = nn.Parameter(torch.ones(3, 2))
        self.bystander.grad = torch.ones(3, 2)
        self.alive: list[_Copy] = []

    def run(self) -> None:
        steps = self.steps
        one, two = self.copy(), self.copy()
        with two.foreign.evaluating():  # as for a validation before the first step
            pass
        for step in range(steps):
            self.advance(one, step)
            self.advance(two, step)
            if not one.same(two):
                raise self.refuse(
                    f"two of it, given the same weights and gradients, came apart in step "
                    f"{step + 1}: it keeps something outside itself, such as in its class, or does "
                    "not repeat what it does"
                )
            if step in (0, steps - 1):  # no other is made in between
                one.foreign.watch_outside()
        refuse_unread(self.use, one.foreign.for_groups, one.foreign.optimizer, self.called)
        saved = _through_a_file(one.foreign)
        weights = [weight.detach().clone() for weight in one.weights]
        loaded = self.load(self.copy(), saved, weights)
        self.same_state(loaded, one, "right after it was loaded")
        for step in range(steps, 2 * steps):
            self.advance(one, step)
            with two.foreign.evaluating():
                pass
            self.advance(two, step)
            self.advance(loaded, step)
            self.compare(one, two, step, "it was in eval mode in between")
            self.compare(one, loaded, step, "its state was saved and loaded")
        self.same_state(loaded, one, "after more steps")
        back = self.load(two, saved, weights)
        for step in range(steps, 2 * steps):
            self.advance(back, step)
        self.compare(one, back, 2 * steps - 1, "it was taken back to an older state")
        self.follows_the_rate()

    def copy(self) -> _Copy:
        """A new one, made as the real one is, with the weights that all of them begin with."""
        source = torch.Generator().manual_seed(SEED)
        members: dict[str, list[tuple[str, Tensor]]] = {}
        weights: list[Tensor] = []
        for role, likes in self.likes.items():
            members[role] = []
            for name, like in likes:
                drawn = 0.05 * torch.randn(like.shape, generator=source)
                weight = nn.Parameter(drawn.to(like.device, like.dtype))
                members[role].append((name, weight))
                weights.append(weight)
        try:
            foreign = Foreign(self.use, members, seed=SEED, recorded=True)
        except OptimError as error:
            raise (_FailedError(error) if error.__cause__ else error) from error
        made = _Copy(foreign, weights)
        self.alive.append(made)
        return made

    def advance(self, copy: _Copy, step: int, multiplier: float | None = None) -> None:
        """One step with the gradients and the learning rate that this step has for every copy."""
        source = torch.Generator().manual_seed(SEED + 1 + step)
        for weight in copy.weights:
            grad = torch.randn(weight.shape, generator=source).mul_(10 ** (-1 - step % 3))
            weight.grad = grad.to(weight.device, weight.dtype)
        foreign, groups = copy.foreign, len(copy.foreign.optimizer.param_groups)
        foreign.set_multiplier(_multiplier(step) if multiplier is None else multiplier)
        rates = [_number(group.get("lr")) for group in foreign.optimizer.param_groups]
        others = [w for other in self.alive if other is not copy for w in other.weights]
        assert self.bystander.grad is not None
        try:
            foreign.step([*others, self.bystander, self.bystander.grad])
        except OptimError as error:
            if isinstance(error.__cause__, Exception) and not step:
                raise _FailedError(error) from error
            raise
        for weight in copy.weights:
            weight.grad = None
        if len(foreign.optimizer.param_groups) != groups:
            raise self.refuse("it adds or removes param groups in a step")
        after = [_number(group.get("lr")) for group in foreign.optimizer.param_groups]
        if foreign.scheduled and after != rates:
            raise self.refuse(
                "it sets the learning rate itself, against the schedule of the recipe: set "
                "scheduled = false beside its use to leave the rate to it"
            )

    def load(self, copy: _Copy, saved: Mapping[str, Tensor], weights: Sequence[Tensor]) -> _Copy:
        with torch.no_grad():
            for weight, value in zip(copy.weights, weights, strict=True):
                weight.copy_(value)
        copy.foreign.loading(saved)()
        return copy

    def compare(self, one: _Copy, other: _Copy, step: int, what: str) -> None:
        if not one.same(other):
            raise self.refuse(
                f"it goes another way after {what} (step {step + 1}): something it depends on is "
                "not in its state, its param groups or its attributes, or it is the order of a "
                "set or memory that an array shares with a tensor, which cannot be saved"
            )

    def same_state(self, one: _Copy, other: _Copy, when: str) -> None:
        left, right = one.foreign.state(), other.foreign.state()
        both = left.keys() & right.keys()
        differing = [key for key in both if not same_bits(left[key], right[key])]
        differing += left.keys() ^ right.keys()
        if differing:
            tree = one.foreign.tree_key
            what = min(set(differing) - {tree}, default="")
            if not what:
                texts = (json.loads(bytes(state[tree].numpy())) for state in (left, right))
                what = f"its {where_apart(*(text['root'] for text in texts)) or 'number'}"
            raise self.refuse(f"its state does not come back exactly: {what} differs {when}")

    def follows_the_rate(self) -> None:
        """A schedule that changes nothing would make a race unfair without a word."""
        one, slower = self.copy(), self.copy()
        if not self.use.scheduled:
            return
        if not one.foreign.scheduled:
            raise self.refuse(
                "its param groups have no `lr` that is a number, so that no schedule reaches it: "
                "call its rate lr, or set scheduled = false beside its use"
            )
        if not any(one.foreign.rates):
            return  # a rate of 0 is one that nothing follows
        begun = [weight.detach().clone() for weight in one.weights]
        for step in range(PATIENT):
            self.advance(one, step, 1.0)
            self.advance(slower, step, 0.25)
            if not one.same(slower):
                return
            # Some gather statistics first, or update every so many steps.
            moved = not all(map(same_bits, one.weights, begun))
            if moved and step >= self.steps - 1:
                break
        if moved:
            raise self.refuse(
                "its steps do not depend on the `lr` of its param groups, so that no schedule "
                "reaches it: read group['lr'] in step(), or set scheduled = false beside its use"
            )

    def refuse(self, why: str) -> OptimError:
        return OptimError(f"{self.called} cannot be used: {why}")


def _multiplier(step: int) -> float:
    """As a schedule goes: up, level, down."""
    return min(1.0, (step + 1) / 4, math.cos(step / (2 * STEPS)))


def _number(lr: Any) -> Any:
    return lr.item() if isinstance(lr, Tensor) and lr.numel() == 1 else lr


def _through_a_file(foreign: Foreign) -> dict[str, Tensor]:
    """As a checkpoint would hold it."""
    from safetensors.torch import load, save

    return load(save({k: v.detach().cpu().contiguous() for k, v in foreign.state().items()}))
