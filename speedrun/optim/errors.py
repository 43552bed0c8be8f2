"""The exception of the optimizers: a mistake of the caller, told in one sentence."""

from speedrun.errors import SpeedrunError


class OptimError(SpeedrunError, ValueError):
    """An argument, parameter, role or saved state that the optimizers cannot use."""
