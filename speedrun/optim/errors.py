"""The exception of the optimizers: a mistake of the caller, told in one sentence."""

from speedrun.errors import ConfigError, SpeedrunError


class OptimError(SpeedrunError, ValueError):
    """An argument, parameter, role or saved state that the optimizers cannot use.

    What reaches the command line is a value of a recipe; what fails in a run is a RunError there.
    """

    exit_code = ConfigError.exit_code
