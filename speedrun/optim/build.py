"""From a recipe to the optimizer of a model: which options each role of parameter gets."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from speedrun.config.optimizer import ROLES, MuonOptions, Role
from speedrun.config.schema import Config, ModelConfig
from speedrun.optim.combined import CombinedOptimizer


def build_optimizer(
    parameters: Iterable[tuple[str, Tensor, Role]], config: Config
) -> CombinedOptimizer:
    """The optimizer of these (name, parameter, role). It leaves NaNs to the caller to find."""
    options: dict[str, dict[str, Any]] = {}
    for role in ROLES:
        chosen = config.optimizer.of(role)
        options[role] = {"kind": chosen.kind, **chosen.values()}
        if isinstance(chosen, MuonOptions):
            options[role]["split_rows"] = _split_rows(role, chosen, config.model)
    grouped = [(name, param, config.optimizer.group(role)) for name, param, role in parameters]
    # The training loop checks gradients itself, on all ranks at once.
    return CombinedOptimizer(grouped, options, check_finite=False)


def _split_rows(role: Role, muon: MuonOptions, model: ModelConfig) -> int | tuple[int, ...]:
    """The rows of a matrix that are orthogonalised apart: of some heads of q and k, or of each."""
    heads, groups, together = model.heads, model.groups, muon.heads_together
    if role in ("q", "k") and together:
        return (heads if role == "q" else groups) // together
    if role == "qkv" and muon.split_qkv:
        by_heads = [together] * ((heads + groups) // together) if together else [heads, groups]
        return tuple(n * model.size_of_head for n in (*by_heads, groups))
    return 1
