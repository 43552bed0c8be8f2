"""One optimizer for a whole model: each parameter by its role, each role by its options.

The model says what its parameters are ('hidden', 'embedding', 'head', ...), the recipe says what is
done with each role, and nothing is guessed from names or shapes:

    optimizer = CombinedOptimizer(
        [(name, parameter, role), ...],
        {"hidden": MuonOptions(lr=0.05), "head": {"kind": "adam", "lr": 0.008}},
    )

To the outside it is one torch.optim.Optimizer with one param group per role. Inside, a Muon and an
Adam share those very group dicts, so whoever sets `lr` here, a scheduler included, sets it there.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from speedrun.config.optimizer import UpdateOptions
from speedrun.config.schedule import Settings
from speedrun.optim.adam import Adam
from speedrun.optim.base import SlotOptimizer
from speedrun.optim.errors import OptimError
from speedrun.optim.muon import Muon
from speedrun.optim.options import read_options

KINDS: dict[str, type[SlotOptimizer]] = {cls.options.kind: cls for cls in (Muon, Adam)}
RoleOptions = UpdateOptions | Mapping[str, Any]


@dataclass(frozen=True)
class PlanRow:
    """What happens to one parameter."""

    name: str
    role: str
    optimizer: str
    lr: float
    count: int
    state_bytes: int


class CombinedOptimizer(SlotOptimizer):
    """Muon and Adam behind one torch.optim.Optimizer, routed by role.

    With several ranks Muon shares its work and state out; Adam does the same on every rank.
    """

    fixed = ("role", "kind", *(name for cls in KINDS.values() for name in cls.fixed))
    kept = tuple(name for cls in KINDS.values() for name in cls.kept)

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor, str]],
        options: Mapping[str, RoleOptions],
        *,
        process_group: dist.ProcessGroup | None = None,
        check_finite: bool = True,
    ) -> None:
        groups = _groups(parameters, {role: _read(role, o) for role, o in options.items()})
        self.optimizers = [
            make(members, process_group=process_group, check_finite=False)
            for kind, make in KINDS.items()
            if (members := [group for group in groups if group["kind"] == kind])
        ]
        super().__init__(
            [group for optimizer in self.optimizers for group in optimizer.param_groups],
            process_group=process_group,
            check_finite=check_finite,
        )
        self.blocks = [block for optimizer in self.optimizers for block in optimizer.blocks]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.blocks:
            raise OptimError(
                "a CombinedOptimizer takes its parameters and roles when it is made; make a new one"
            )
        unwrap(Optimizer.add_param_group)(self, param_group)

    @classmethod
    def read_group(cls, group: Mapping[str, Any]) -> dict[str, Any]:
        return KINDS[group["kind"]].read_group(group)

    def apply_settings(self, settings: Settings) -> None:
        """Take over what is scheduled for the next step."""
        self.set_multiplier(settings.learning_rate_multiplier)
        self.set_momentum(settings.momentum)

    def set_multiplier(self, multiplier: float) -> None:
        """Set every learning rate to this multiple of its own."""
        for group in self.param_groups:
            group["lr"] = group["initial_lr"] * multiplier

    def prepare(self) -> None:
        for optimizer in self.optimizers:
            optimizer.prepare()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.update()

    def plan(self) -> list[PlanRow]:
        """One row per parameter; the bytes of state are those of all ranks together."""
        return [
            PlanRow(
                blocks[0].name,
                blocks[0].group["role"],
                blocks[0].group["kind"],
                blocks[0].group["initial_lr"],
                blocks[0].param.numel(),
                sum(block.state_bytes() for block in blocks),
            )
            for blocks in self._by_parameter()
        ]

    def plan_table(self) -> str:
        """The plan as text, with a sum per role."""
        rows, totals = self.plan(), []
        for role in dict.fromkeys(row.role for row in rows):
            same = [row for row in rows if row.role == role]
            count, size = sum(row.count for row in same), sum(row.state_bytes for row in same)
            totals.append(PlanRow("total", role, same[0].optimizer, same[0].lr, count, size))
        table = [("parameter", "role", "optimizer", "lr", "count", "bytes of state")]
        for r in (*rows, *totals):
            numbers = f"{r.lr:g}", f"{r.count:,}", f"{r.state_bytes:,}"
            table.append((r.name, r.role, r.optimizer, *numbers))
        width = max(len(row[0]) for row in table)
        return "\n".join(
            f"{name:<{width}}  {role:<15}  {kind:<9}  {lr:>8}  {count:>13}  {size:>14}"
            for name, role, kind, lr, count, size in table
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizers": self.optimizers}


def _read(role: str, given: RoleOptions) -> dict[str, Any]:
    """The options of a role as entries of its param group."""
    if isinstance(given, UpdateOptions):
        ignored = sorted(given.recipe_only & given.model_fields_set)
        if ignored:
            raise OptimError(
                f"the options of role {role!r} set {ignored[0]}, which only a recipe has; "
                f"the options of {given.kind} are {', '.join(given.names())}"
            )
        kind, values = given.kind, given.values()
    else:
        values = dict(given)
        kind = values.pop("kind", None)
        if kind not in KINDS:
            known = " or ".join(map(repr, KINDS))
            raise OptimError(f"the options of role {role!r} have kind={kind!r}; use {known}")
        if "lr" not in values:
            raise OptimError(f"the {kind} options of role {role!r} have no 'lr'; give it one")
    try:
        checked = read_options(KINDS[kind].options, values)
    except OptimError as error:
        raise OptimError(f"role {role!r}: {error}") from None
    return {"role": role, "kind": kind, "initial_lr": checked["lr"], **checked}


def _groups(
    parameters: Iterable[tuple[str, Tensor, str]], options: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """One param group per role, in the order in which roles first appear."""
    by_role: defaultdict[str, list[tuple[str, Tensor]]] = defaultdict(list)
    name_of: dict[Tensor, str] = {}
    for name, param, role in parameters:
        if role not in options:
            raise OptimError(
                f"parameter {name} has role {role!r}, which has no options; "
                f"there are options for {', '.join(options) or 'nothing'}"
            )
        if param in name_of:
            raise OptimError(
                f"parameters {name_of[param]} and {name} are one tensor; list it once, in one role"
            )
        if name in name_of.values():
            raise OptimError(f"two parameters are called {name}; names must differ")
        name_of[param] = name
        by_role[role].append((name, param))
    if not name_of:
        raise OptimError("there are no parameters to optimize; check what the model lists")
    return [{"params": members, **options[role]} for role, members in by_role.items()]
