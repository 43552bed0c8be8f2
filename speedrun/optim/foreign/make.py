"""Making somebody else's optimizer: arguments that it takes, errors that say which it takes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from speedrun.config.calling import gist
from speedrun.optim.errors import OptimError
from speedrun.optim.foreign.tree import Owner, write
from speedrun.optim.foreign.values import hooks_of

Members = Mapping[str, Sequence[tuple[str, Tensor]]]  # (name, parameter) by role
OPTIONS = ("make", "use", "code", "args", "scheduled", "random")


@dataclass(frozen=True)
class Use:
    """What a recipe says about somebody else's optimizer."""

    make: Callable[..., Any]
    use: str  # as the recipe names it
    code: str = ""  # hash of that code
    args: Mapping[str, Any] = field(default_factory=dict)
    scheduled: bool = True  # False: the learning rate is left as it is
    random: bool = False  # True: it draws random numbers, from a stream of its own

    @staticmethod
    def read(role: str, given: Mapping[str, Any]) -> Use:
        unknown = sorted(set(given) - set(OPTIONS))
        if unknown or "make" not in given:
            wrong = f"have {unknown[0]!r}" if unknown else "lack 'make'"
            raise OptimError(
                f"the options of role {role!r} {wrong}; an optimizer of another package has "
                f"{', '.join(OPTIONS)}, and its own arguments in args"
            )
        make = given["make"]
        if not callable(make):
            named = given.get("use") or f"the 'make' of role {role!r}"
            raise OptimError(f"{named} is {make!r}; name a class of optimizers, or a function")
        use = given.get("use") or f"{make.__module__}:{make.__qualname__}"
        flags = {key: bool(given[key]) for key in ("scheduled", "random") if key in given}
        args = dict(given.get("args") or {})
        return Use(make, str(use), str(given.get("code", "")), args, **flags)

    def named(self, roles: Sequence[str]) -> str:
        return f"{self.use} (for {' and '.join(roles)})"


class Recorded(dict[str, Any]):
    """A param group that knows which of its entries were read."""

    written_as = "dict"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def pop(self, key: str, *default: Any) -> Any:
        self.read.add(key)
        return super().pop(key, *default)

    def keys(self) -> Any:
        self.read.update(super().keys())
        return super().keys()

    def items(self) -> Any:
        self.read.update(super().keys())
        return super().items()

    def __iter__(self) -> Any:
        self.read.update(super().keys())
        return super().__iter__()


Recorded.__name__ = "dict"  # as which it is named where somebody's code has trouble with it


def takes(make: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names of the arguments after the parameters, and whether any other name is taken."""
    try:
        _, *others = signature(make).parameters.values()
    except (TypeError, ValueError):
        return [], True
    anything = any(one.kind is Parameter.VAR_KEYWORD for one in others)
    stars = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
    return [one.name for one in others if one.kind not in stars], anything


def for_groups(use: Use, members: Members) -> set[str]:
    """Which arguments are options of its param groups: the class itself makes nothing of them.

    One that takes any name may make nothing of it, either: then the object is the same without it.
    """
    names, anything = takes(use.make)
    unknown = {key for key in use.args if key not in names}
    return {key for key in unknown if not anything or not _leaves_a_trace(use, key, members)}


def _leaves_a_trace(use: Use, key: str, members: Members) -> bool:
    params = {name: param for group in members.values() for name, param in group}
    trees = []
    for left_out in ({key}, set[str]()):
        try:
            made = use.make(_groups(members), **_arguments(use, left_out))
            trees.append(write(made, Owner.of(made, params, use.make), "", {}).tree)
        except Exception:
            return False
    return trees[0] != trees[1]


def construct(
    use: Use, members: Members, extra: set[str], called: str, *, recorded: bool = False
) -> Optimizer:
    """The optimizer with a param group for each role, made in the way that its class takes.

    `extra` are the arguments that are options of the groups.
    """
    params = [param for group in members.values() for _, param in group]
    hooks, failures = [*map(hooks_of, params)], list[BaseException]()
    first = _first(use.make)
    if first in use.args:
        raise OptimError(f"{called} is given {first} here: leave it out of args")
    for given in _ways(use, members, extra, recorded):
        try:
            made = use.make(given, **_arguments(use, extra))
            break
        except (Exception, SystemExit) as error:
            failures.append(error)
    else:
        told = failures[-1 if "'dict' object" in str(failures[0]) else 0]
        strange = f"{', '.join(sorted(extra))} is no argument of it, and " if extra else ""
        raise OptimError(
            f"{called} cannot be made: {strange}{gist(told, use.make)}; {_takes_text(use)}"
        ) from told
    if not isinstance(made, Optimizer):
        raise OptimError(
            f"{called} gives a {type(made).__name__}, which is no torch.optim.Optimizer; name a "
            "class of one"
        )
    if hooks != [*map(hooks_of, params)]:
        raise OptimError(
            f"{called} hooks into the backward pass; it must do all its work in step()"
        )
    return made


def _ways(use: Use, members: Members, extra: set[str], recorded: bool) -> Iterator[Any]:
    """What classes want as their first argument: param groups, names with parameters, or a list."""
    if _first(use.make) == "named_parameters":
        yield [pair for group in members.values() for pair in group]
        return
    yield _groups(members, {key: use.args[key] for key in extra}, Recorded if recorded else dict)
    if not extra:
        yield [param for group in members.values() for _, param in group]


def _groups(
    members: Members, options: Mapping[str, Any] | None = None, cls: type[dict[str, Any]] = dict
) -> list[dict[str, Any]]:
    return [
        cls({"params": [param for _, param in group], **copy.deepcopy(dict(options or {}))})
        for group in members.values()
    ]


def _first(make: Callable[..., Any]) -> str:
    try:
        return next(iter(signature(make).parameters), "")
    except (TypeError, ValueError):
        return ""


def _takes_text(use: Use) -> str:
    names, _ = takes(use.make)
    return f"it takes {', '.join(names) or 'options of its param groups, which args give it'}"


def _arguments(use: Use, left_out: set[str]) -> dict[str, Any]:
    """Copies, as two of it must not share them."""
    return {
        key: _as_taken(use.make, key, copy.deepcopy(value))
        for key, value in use.args.items()
        if key not in left_out
    }


def _as_taken(make: Callable[..., Any], key: str, value: Any) -> Any:
    """A recipe has lists where Python has tuples, such as betas."""
    try:
        tuples = isinstance(signature(make).parameters[key].default, tuple)
    except (TypeError, ValueError, KeyError):
        tuples = False
    return tuple(value) if tuples and isinstance(value, list) else value


def refuse_unread(use: Use, extra: set[str], made: Optimizer, called: str) -> None:
    """An option of the groups that it never looks at is a mistake in a name."""
    groups = [group for group in made.param_groups if isinstance(group, Recorded)]
    for key in sorted(extra) if groups else ():
        if all(key not in group.read for group in groups):
            raise OptimError(
                f"{called} has no argument {key} and reads no such option of a param group; "
                f"{_takes_text(use)}"
            )
