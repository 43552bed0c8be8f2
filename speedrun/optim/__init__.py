"""Optimizers and schedules. Needs torch only; nothing here knows the rest of the package."""

from speedrun.optim.adam import Adam
from speedrun.optim.combined import (
    AdamRule,
    CombinedOptimizer,
    MuonRule,
    PlanRow,
    Rule,
    adam_everywhere,
    read_rule,
)
from speedrun.optim.errors import OptimError
from speedrun.optim.finite import NonFiniteGradientError, refuse_non_finite
from speedrun.optim.muon import Muon
from speedrun.optim.orthogonalize import orthogonalize

__all__ = [
    "Adam",
    "AdamRule",
    "CombinedOptimizer",
    "Muon",
    "MuonRule",
    "NonFiniteGradientError",
    "OptimError",
    "PlanRow",
    "Rule",
    "adam_everywhere",
    "orthogonalize",
    "read_rule",
    "refuse_non_finite",
]
