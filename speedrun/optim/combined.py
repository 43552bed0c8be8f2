"""One optimizer for a whole model: each parameter by its role, each role by its options.

The model says what its parameters are ('hidden', 'embedding', 'head', ...), the recipe says what is
done with each role, and nothing is guessed from names or shapes:

    optimizer = CombinedOptimizer(
        [(name, parameter, role), ...],
        {"hidden": MuonOptions(lr=0.05), "head": {"kind": "adam", "lr": 0.008}},
    )

To the outside it is one torch.optim.Optimizer with one param group per role. Inside, a Muon and an
Adam share those very group dicts, so whoever sets `lr` here, a scheduler included, sets it there.

A role can also go by an optimizer of somebody else's (foreign/), any torch.optim.Optimizer class:

    {"hidden": {"kind": "own", "make": torch.optim.RMSprop, "args": {"lr": 0.001}}}

It keeps its groups and its state in its own way. They are stepped, scheduled, saved and loaded with
ours, and roles that name the same class with the same arguments share one instance.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from speedrun.config.optimizer import UpdateOptions
from speedrun.config.schedule import Settings
from speedrun.optim.adam import Adam
from speedrun.optim.base import ParamBlock, SlotOptimizer
from speedrun.optim.errors import OptimError
from speedrun.optim.finite import refuse_non_finite
from speedrun.optim.foreign import Foreign, Use
from speedrun.optim.foreign.probe import probe
from speedrun.optim.muon import Muon
from speedrun.optim.options import read_options

KINDS: dict[str, type[SlotOptimizer]] = {cls.options.kind: cls for cls in (Muon, Adam)}
OWN = "own"  # the kind of those that a user brings
FOREIGN = "foreign"  # where a state_dict keeps theirs
WATCHED_FIRST, WATCHED_EVERY = 4, 64  # steps in which theirs are watched
RoleOptions = UpdateOptions | Mapping[str, Any]


@dataclass(frozen=True)
class PlanRow:
    """What happens to one parameter."""

    name: str
    role: str
    optimizer: str
    lr: float | None  # None: it has none
    count: int
    state_bytes: int | None  # None: it is not known before the first step


class CombinedOptimizer(SlotOptimizer):
    """Muon and Adam behind one torch.optim.Optimizer, routed by role.

    With several ranks both share work and state out: Muon by matrices, Adam by rows of tables.
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
        seed: int = 0,
    ) -> None:
        """`seed` is that of the random numbers of others' optimizers, where they may draw some."""
        read = {role: _read(role, given) for role, given in options.items()}
        groups = _groups(parameters, read)
        self._named: dict[str, Tensor] = dict(pair for group in groups for pair in group["params"])
        self.optimizers = [
            make(members, process_group=process_group, check_finite=False)
            for kind, make in KINDS.items()
            if (members := [group for group in groups if group["kind"] == kind])
        ]
        theirs = [group for group in groups if group["kind"] == OWN]
        self.foreign = _foreign(theirs, seed)
        self._own_groups = [g for one in self.optimizers for g in one.param_groups]
        self._steps, self._made = 0, False
        super().__init__(
            # torch completes and names groups, which theirs are not to see.
            [*self._own_groups, *({"params": group["params"]} for group in theirs)],
            process_group=process_group,
            check_finite=check_finite,
        )
        their_groups = [group for one in self.foreign for group in one.optimizer.param_groups]
        self.param_groups = [*self._own_groups, *their_groups]
        self.blocks = [block for optimizer in self.optimizers for block in optimizer.blocks]
        self._made = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._made:
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
        for group in self._own_groups:
            group["lr"] = group["initial_lr"] * multiplier
        for foreign in self.foreign:
            foreign.set_multiplier(multiplier)

    def set_momentum(self, value: float) -> None:
        """Set our Muon's; what others call momentum is an argument of theirs."""
        for optimizer in self.optimizers:
            optimizer.set_momentum(value)

    def shares(self) -> list[list[ParamBlock]]:
        return [blocks for optimizer in self.optimizers for blocks in optimizer.shares()]

    def prepare(self) -> None:
        for optimizer in self.optimizers:
            optimizer.prepare()

    def refuse_non_finite(self) -> None:
        refuse_non_finite(self._named.items())

    def update(self, good: Tensor | None = None) -> None:
        assert good is None or not self.foreign, "whether theirs make a step is known beforehand"
        for optimizer in reversed(self.optimizers):  # Adam's rows travel while Muon computes
            optimizer.update(good)
        for optimizer in self.optimizers:
            optimizer.finish()
        watched = self._steps < WATCHED_FIRST or self._steps % WATCHED_EVERY == 0
        for foreign in self.foreign:
            others = [p for name, p in self._named.items() if name not in foreign.params]
            if self.world > 1:
                # These may lie in buckets that the next backward fills, and theirs may keep one.
                for param in foreign.params.values():
                    param.grad = None if param.grad is None else param.grad.clone()
            foreign.step(others if watched else ())
        for foreign in self.foreign:  # after all of them: two may be of one file and share in it
            if self._steps == 0:
                foreign.written()  # what cannot be saved is told now, not at a checkpoint
            if watched:
                foreign.watch_outside()
        self._steps += 1

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The parameters hold the weights to be used, and afterwards those to be trained, again to
        the last bit. They differ with optimizers that have modes, such as ScheduleFree's."""
        with ExitStack() as stack:
            for foreign in self.foreign:
                stack.enter_context(foreign.evaluating())
            yield

    # State: ours by slots (base.py), theirs by what they are found to hold.

    def state_bytes(self) -> int:
        """Bytes of state that this rank holds, scalars of ours left out; of others' what is there,
        which before the first step is nothing."""
        theirs = (foreign.state_bytes() or {} for foreign in self.foreign)
        return super().state_bytes() + sum(sum(found.values()) for found in theirs)

    def export_state(self) -> dict[str, Tensor]:
        """The whole state as {'name:slot': tensor}, copied to the CPU; fit for safetensors.

        Of an optimizer of somebody else's it has beside the tensors a text with all its numbers,
        '[roles]:tree'. With several ranks all of them must call this, and all get the whole.
        """
        self._steps = 0  # the steps after a checkpoint are watched, too
        found = super().export_state()
        for foreign in self.foreign:
            foreign.watch_outside()
            found |= {k: t.detach().to("cpu", copy=True) for k, t in foreign.state().items()}
        return found

    def import_state(self, flat: Mapping[str, Tensor]) -> None:
        """Load what `export_state` gave, on any number of ranks. All or nothing."""
        loads, theirs = self._loads(flat)
        super().import_state({key: t for key, t in flat.items() if key not in theirs})
        for load in loads:
            load()

    def _loads(self, flat: Mapping[str, Tensor]) -> tuple[list[Callable[[], None]], set[str]]:
        """What loads the state of others, and the names of the tensors that it takes."""
        taken: set[str] = set()
        for foreign in self.foreign:
            taken |= foreign.keys_in(flat)
        strange = [key for key in flat if key.endswith("]:tree") and key not in taken]
        if strange:
            raise OptimError(
                f"the saved state has one of another optimizer for {strange[0][1:-6]}, where this "
                "one has none; build it with the options it was saved with"
            )
        return [foreign.loading(flat) for foreign in self.foreign], taken

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's form, the same for any number of ranks; all must call this."""
        whole, self.param_groups = self.param_groups, self._own_groups
        try:
            found = super().state_dict()
        finally:
            self.param_groups = whole
        if self.foreign:
            found[FOREIGN] = {k: t.clone() for one in self.foreign for k, t in one.state().items()}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` saved on any number of ranks. Nothing is changed unless all fits."""
        loads, _ = self._loads(state_dict.get(FOREIGN, {}))
        whole, self.param_groups = self.param_groups, self._own_groups
        try:
            super().load_state_dict(state_dict)
        finally:
            self.param_groups = whole
        for load in loads:
            load()

    def plan(self) -> list[PlanRow]:
        """One row per parameter; the bytes of state are those of all ranks together."""
        ours = [
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
        theirs = []
        for one in self.foreign:
            sizes = one.state_bytes()
            theirs += [
                PlanRow(
                    name,
                    one.role_of[name],
                    one.use.use,
                    one.rate_of(param),
                    param.numel(),
                    None if sizes is None else sizes.get(name, 0),
                )
                for name, param in one.params.items()
            ]
        return [*ours, *theirs]

    def plan_table(self) -> str:
        """The plan as text, with a sum per role."""
        rows, totals = self.plan(), []
        for role in dict.fromkeys(row.role for row in rows):
            same = [row for row in rows if row.role == role]
            sizes = [row.state_bytes for row in same if row.state_bytes is not None]
            count, size = sum(row.count for row in same), sum(sizes) if sizes else None
            totals.append(PlanRow("total", role, same[0].optimizer, same[0].lr, count, size))
        table = [("parameter", "role", "optimizer", "lr", "count", "bytes of state")]
        for r in (*rows, *totals):
            held = "after a step" if r.state_bytes is None else f"{r.state_bytes:,}"
            rate = "none" if r.lr is None else f"{r.lr:g}"
            table.append((r.name, r.role, r.optimizer, rate, f"{r.count:,}", held))
        width, kinds = (max(9, *(len(row[i]) for row in table)) for i in (0, 2))
        return "\n".join(
            f"{name:<{width}}  {role:<15}  {kind:<{kinds}}  {lr:>8}  {count:>13}  {size:>14}"
            for name, role, kind, lr, count, size in table
        )

    def __getstate__(self) -> dict[str, Any]:
        own = ("optimizers", "foreign", "_named", "_own_groups", "_steps", "_made")
        return {**super().__getstate__(), **{key: getattr(self, key) for key in own}}


def _foreign(groups: Iterable[Mapping[str, Any]], seed: int) -> list[Foreign]:
    """One instance for all roles that say the same of it; each is tried out first."""
    members: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for group in groups:
        members[repr(group["use"])].append(group)
    made = []
    for same in members.values():
        use: Use = same[0]["use"]
        by_role = {group["role"]: group["params"] for group in same}
        made.append(Foreign(use, by_role, seed=seed))
        probe(use, by_role)
    return made


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
        if kind == OWN:
            return {"role": role, "kind": OWN, "use": Use.read(role, values)}
        if kind not in KINDS:
            known = f"{', '.join(map(repr, KINDS))} or {OWN!r}"
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
