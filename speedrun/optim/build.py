"""From a recipe to the optimizer of a model: which options each role of parameter gets."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from speedrun.config.optimizer import ROLES, MuonOptions
from speedrun.config.schema import Config
from speedrun.optim.combined import CombinedOptimizer


def build_optimizer(
    parameters: Iterable[tuple[str, Tensor, str]], config: Config
) -> CombinedOptimizer:
    """The optimizer of these (name, parameter, role). It leaves NaNs to the caller to find."""
    options: dict[str, dict[str, Any]] = {}
    for role in ROLES:
        chosen = config.optimizer.of(role)
        options[role] = {"kind": chosen.kind, **chosen.values()}
        if role == "qkv" and isinstance(chosen, MuonOptions) and chosen.split_qkv:
            model = config.model
            heads = (model.heads, model.groups, model.groups)
            options[role]["split_rows"] = tuple(n * model.size_of_head for n in heads)
    # The training loop checks gradients itself, on all ranks at once.
    return CombinedOptimizer(parameters, options, check_finite=False)
