"""One optimizer for a whole model: each parameter by its role, each role by its rule.

The model says what its parameters are ('hidden', 'embedding', 'head', ...), the recipe says what is
done with each role, and nothing is guessed from names or shapes:

    optimizer = CombinedOptimizer(
        [(name, parameter, role), ...],
        {"hidden": MuonRule(lr=0.05), "embedding": AdamRule(lr=0.6), "head": AdamRule(lr=0.008)},
    )

To the outside it is one torch.optim.Optimizer with one param group per role. Inside, a Muon and an
Adam share those very group dicts, so whoever sets `lr` here, a scheduler included, sets it there.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor

from speedrun.optim.adam import Adam
from speedrun.optim.base import UncompiledOptimizer
from speedrun.optim.errors import OptimError
from speedrun.optim.finite import refuse_non_finite
from speedrun.optim.muon import READING, Muon
from speedrun.optim.orthogonalize import Coefficients
from speedrun.optim.state import NamedState, check_state, merge_options, unpack


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What is done with the parameters of a role; weight decay is decoupled."""

    lr: float
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AdamRule(Rule):
    """Adam, or AdamW with weight decay."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class MuonRule(Rule):
    """Muon; the options are those of the class `Muon`."""

    momentum: float = 0.95
    nesterov: bool = True
    scale: str = "spectral"
    coefficients: Coefficients = "classic"
    steps: int = 5
    eps: float = 1e-7
    dtype: torch.dtype | None = None
    batch_dims: int | None = None
    row_dims: int | None = None
    split_rows: int | tuple[int, ...] = 1
    split_cols: int | tuple[int, ...] = 1


KINDS: dict[str, type[Rule]] = {"adam": AdamRule, "muon": MuonRule}


def read_rule(role: str, options: Mapping[str, Any]) -> Rule:
    """A rule from plain data: {'kind': 'muon' or 'adam', 'lr': ..., ...}."""
    rest = dict(options)
    kind = rest.pop("kind", None)
    if kind not in KINDS:
        raise OptimError(f"the rule for role {role!r} has kind={kind!r}; use 'muon' or 'adam'")
    allowed = [field.name for field in fields(KINDS[kind])]
    unknown = sorted(set(rest) - set(allowed))
    if unknown or "lr" not in rest:
        wrong = f"an unknown option {unknown[0]!r}" if unknown else "no 'lr'"
        raise OptimError(
            f"the {kind} rule for role {role!r} has {wrong}; its options are {', '.join(allowed)}"
        )
    return KINDS[kind](**rest)


def adam_everywhere(roles: Iterable[str], twin: AdamRule) -> dict[str, Rule]:
    """The AdamW twin of a recipe: the same roles, one Adam rule for all of them."""
    return dict.fromkeys(roles, twin)


@dataclass(frozen=True)
class PlanRow:
    """What happens to one parameter."""

    name: str
    role: str
    optimizer: str
    lr: float
    count: int
    state_bytes: int


class CombinedOptimizer(UncompiledOptimizer):
    """Muon and Adam behind one torch.optim.Optimizer, routed by role.

    With several ranks Muon shares its work and momenta out; Adam does the same on every rank.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor, str]],
        rules: Mapping[str, Rule | Mapping[str, Any]],
        *,
        process_group: dist.ProcessGroup | None = None,
        check_finite: bool = True,
    ) -> None:
        read = {
            role: rule if isinstance(rule, Rule) else read_rule(role, rule)
            for role, rule in rules.items()
        }
        groups = _groups(list(parameters), read)
        muon = [group for group in groups if group["kind"] == "muon"]
        adam = [group for group in groups if group["kind"] == "adam"]
        self.check_finite = check_finite
        self.muon = Muon(muon, process_group=process_group, check_finite=False) if muon else None
        self.adam = Adam(adam, check_finite=False) if adam else None
        self._sealed = False
        super().__init__(
            [group for part in (self.muon, self.adam) if part for group in part.param_groups], {}
        )
        self._sealed = True
        for part in (self.muon, self.adam):
            if part:
                self.state.update(part.state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._sealed:
            raise OptimError(
                "a CombinedOptimizer takes its parameters and roles when it is made; make a new one"
            )
        super().add_param_group(param_group)

    def set_multiplier(self, multiplier: float) -> None:
        """Set every learning rate to this multiple of its rule's."""
        for group in self.param_groups:
            group["lr"] = group["initial_lr"] * multiplier

    def set_momentum(self, value: float) -> None:
        """Set Muon's momentum; Adam's betas stay."""
        if self.muon:
            self.muon.set_momentum(value)

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
            refuse_non_finite((name, param) for _, name, param in self._named())
        if self.muon:
            self.muon.step()
        if self.adam:
            self.adam.step()
        return loss

    def _named(self) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        for group in self.param_groups:
            for name, param in zip(group["param_names"], group["params"], strict=True):
                yield group, name, param

    def plan(self) -> list[PlanRow]:
        """One row per parameter; the bytes of state are those of all ranks together."""
        return [
            PlanRow(
                name,
                group["role"],
                group["kind"],
                group["initial_lr"],
                param.numel(),
                4 * param.numel() * (1 if group["kind"] == "muon" else 2),
            )
            for group, name, param in self._named()
        ]

    def plan_table(self) -> str:
        """The plan as text, with a sum per role."""
        rows = [
            (r.name, r.role, r.optimizer, f"{r.lr:g}", f"{r.count:,}", f"{r.state_bytes:,}")
            for r in self.plan()
        ]
        sums: defaultdict[tuple[str, str, float], list[int]] = defaultdict(lambda: [0, 0])
        for row in self.plan():
            total = sums[row.role, row.optimizer, row.lr]
            total[0] += row.count
            total[1] += row.state_bytes
        totals = [
            ("total", role, kind, f"{lr:g}", f"{count:,}", f"{size:,}")
            for (role, kind, lr), (count, size) in sums.items()
        ]
        head = ("parameter", "role", "optimizer", "lr", "count", "bytes of state")
        widths = [max(map(len, column)) for column in zip(head, *rows, *totals, strict=True)]
        rule = tuple("-" * width for width in widths)
        left = (True, True, True, False, False, False)
        return "\n".join(
            "  ".join(
                cell.ljust(width) if is_left else cell.rjust(width)
                for cell, width, is_left in zip(line, widths, left, strict=True)
            ).rstrip()
            for line in (head, rule, *rows, rule, *totals)
        )

    def state_bytes(self) -> int:
        """Bytes of moments that this rank holds; step counters (4 each) are left out."""
        return sum(
            tensor.numel() * tensor.element_size()
            for state in self.state.values()
            for slot, tensor in state.items()
            if slot != "step"
        )

    def _whole_state(self, device: str | None = None) -> defaultdict[Tensor, dict[str, Tensor]]:
        whole: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        if self.muon:
            whole.update(self.muon.gathered_state(device))
        if self.adam:
            whole.update(self.adam.state)
        return whole

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's form, independent of the ranks; all of them must call this."""
        own, self.state = self.state, self._whole_state()
        try:
            return super().state_dict()
        finally:
            self.state = own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` saved on any number of ranks. Nothing is changed unless all fits."""
        saved = unpack(self, state_dict)
        check_state(saved, self._expected())
        options = merge_options(
            state_dict["param_groups"],
            self.param_groups,
            fixed=("role", "kind", *READING),
            kept=("dtype",),
        )
        for group, chosen in zip(self.param_groups, options, strict=True):
            group.update(chosen)
        self._load(saved)

    def export_state(self) -> dict[str, Tensor]:
        """The moments as {'name:slot': tensor}, copied to the CPU; fit for safetensors.

        Rates and momentum are not in it: they are functions of the step. With several ranks all of
        them must call this, and all get the whole.
        """
        whole = self._whole_state("cpu")
        return {
            f"{name}:{slot}": tensor.detach().to("cpu", copy=True).contiguous()
            for _, name, param in self._named()
            for slot, tensor in whole[param].items()
        }

    def import_state(self, flat: Mapping[str, Tensor]) -> None:
        """Load what `export_state` gave, on any number of ranks. All or nothing."""
        saved: NamedState = {}
        for key, tensor in flat.items():
            name, _, slot = key.rpartition(":")
            saved.setdefault(name, {})[slot] = tensor
        check_state(saved, self._expected())
        self._load(saved)

    def _expected(self) -> dict[str, dict[str, torch.Size]]:
        expected = self.muon.expected_state() if self.muon else {}
        return expected | (self.adam.expected_state() if self.adam else {})

    def _load(self, saved: NamedState) -> None:
        if self.muon:
            self.muon.load_named(saved)
        if self.adam:
            self.adam.load_named(saved)

    def __getstate__(self) -> dict[str, Any]:
        own = ("muon", "adam", "check_finite", "_sealed")
        return {**super().__getstate__(), **{key: getattr(self, key) for key in own}}


def _groups(parameters: list[tuple[str, Tensor, str]], rules: Mapping[str, Rule]) -> list[Any]:
    """One param group per role, in the order in which roles first appear."""
    by_role: defaultdict[str, list[tuple[str, Tensor]]] = defaultdict(list)
    name_of: dict[Tensor, str] = {}
    names: set[str] = set()
    for name, param, role in parameters:
        if role not in rules:
            raise OptimError(
                f"parameter {name} has role {role!r}, which no rule claims; "
                f"there are rules for {', '.join(rules) or 'nothing'}"
            )
        if param in name_of:
            raise OptimError(
                f"parameters {name_of[param]} and {name} are one tensor; list it once, in one role"
            )
        if name in names:
            raise OptimError(f"two parameters are called {name}; names must differ")
        names.add(name)
        name_of[param] = name
        by_role[role].append((name, param))
    if not name_of:
        raise OptimError("there are no parameters to optimize; check what the model lists")
    return [
        {
            "params": members,
            "role": role,
            "kind": "muon" if isinstance(rules[role], MuonRule) else "adam",
            "initial_lr": rules[role].lr,
            **asdict(rules[role]),
        }
        for role, members in by_role.items()
    ]
