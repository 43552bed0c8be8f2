"""From a recipe to the optimizer of a model: which options each role of parameter gets."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from speedrun.config.architecture import ModelConfig
from speedrun.config.code import load
from speedrun.config.optimizer import ROLES, MuonOptions, OwnOptions, Role
from speedrun.config.schema import Config
from speedrun.optim.combined import CombinedOptimizer

ADAMS_NUMBERS = 2  # of state for each weight


def build_optimizer(
    parameters: Iterable[tuple[str, Tensor, Role]], config: Config
) -> CombinedOptimizer:
    """The optimizer of these (name, parameter, role). It leaves NaNs to the caller to find.

    Of code that the recipe names only what parameters are there for is imported.
    """
    grouped = [(name, param, config.optimizer.group(role)) for name, param, role in parameters]
    present = {role for _, _, role in grouped}
    options: dict[str, dict[str, Any]] = {}
    for role in ROLES:
        chosen = config.optimizer.of(role)
        if isinstance(chosen, OwnOptions) and config.optimizer.is_own(role):
            if role in present:
                options[role] = _own(chosen)
            continue
        options[role] = {"kind": chosen.kind, **chosen.values()}
        if isinstance(chosen, MuonOptions):
            options[role]["split_rows"] = _split_rows(role, chosen, config.model)
            options[role]["overlap"] = config.machine.overlap_gathers
            if config.machine.rehearsal and chosen.dtype == "auto":
                options[role]["dtype"] = "bf16"  # as on a GPU
    # The training loop checks gradients itself, on all ranks at once.
    return CombinedOptimizer(grouped, options, seed=config.train.seed, check_finite=False)


def expected_state_bytes(
    parameters: Iterable[tuple[str, Tensor, Role]], config: Config, ranks: int
) -> tuple[int, list[str]]:
    """Bytes of state that a rank will have, and the optimizers for which that is a guess.

    Ours share theirs out, but for what is small. What code that the recipe names will keep shows
    when it has made a step, and here nothing is imported; it is taken to keep as much as Adam.
    """
    parameters = list(parameters)
    own = [entry for entry in parameters if config.optimizer.is_own(entry[2])]
    ours = [entry for entry in parameters if not config.optimizer.is_own(entry[2])]
    known = build_optimizer(ours, config).state_bytes() if ours else 0
    theirs = sum(ADAMS_NUMBERS * 4 * param.numel() for _, param, _ in own)
    tables = {config.optimizer.table(role) for _, _, role in own}
    return known // ranks + theirs, sorted(
        {getattr(config.optimizer, table).use for table in tables}
    )


def _own(chosen: OwnOptions) -> dict[str, Any]:
    """What CombinedOptimizer takes for an optimizer that the recipe names."""
    keys = ("kind", "use", "code", "args", "scheduled", "random")
    return {"make": load(chosen), **{key: getattr(chosen, key) for key in keys}}


def _split_rows(role: Role, muon: MuonOptions, model: ModelConfig) -> int | tuple[int, ...]:
    """The rows of a matrix that are orthogonalised apart: of some heads of q and k, or of each."""
    heads, groups, together = model.heads, model.groups, muon.heads_together
    if role in ("q", "k") and together:
        return (heads if role == "q" else groups) // together
    if role == "qkv" and muon.split_qkv:
        by_heads = [together] * ((heads + groups) // together) if together else [heads, groups]
        return tuple(n * model.size_of_head for n in (*by_heads, groups))
    return 1
