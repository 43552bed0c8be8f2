"""The one exception of this package: a mistake of the caller, told in one sentence."""


class OptimError(ValueError):
    """An argument, parameter, role or saved state that the optimizers cannot use."""
