"""Optimizers. They need torch, and of this package only what `config/` declares."""

from speedrun.config.optimizer import AdamOptions, MuonOptions
from speedrun.optim.adam import Adam, adam_update
from speedrun.optim.combined import CombinedOptimizer
from speedrun.optim.errors import OptimError
from speedrun.optim.finite import NonFiniteGradientError, refuse_non_finite
from speedrun.optim.muon import Muon, muon_update
from speedrun.optim.orthogonalize import orthogonalize

__all__ = [
    "Adam",
    "AdamOptions",
    "CombinedOptimizer",
    "Muon",
    "MuonOptions",
    "NonFiniteGradientError",
    "OptimError",
    "adam_update",
    "muon_update",
    "orthogonalize",
    "refuse_non_finite",
]
