"""What each parameter is to the optimizer: hidden matrix, embedding, head, scalar and so on.

The optimizer's options are per role. A module that owns parameters declares their roles in
`parameter_roles`, by parameter name, so no role is guessed from a name or a shape and a new module
cannot fall into the wrong group unnoticed.
"""

from torch import nn

from speedrun.config.optimizer import MATRIX_ROLES, ROLES, Role
from speedrun.errors import ConfigError

MATRICES: tuple[Role, ...] = (*MATRIX_ROLES, "head")  # used in matrix multiplications


def roles_of(model: nn.Module) -> dict[str, Role]:
    """The role of each parameter by its full name; refuses a parameter without one."""
    roles: dict[str, Role] = {}
    for prefix, module in model.named_modules():
        declared: dict[str, Role] = getattr(module, "parameter_roles", {})
        for name, _ in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}".lstrip(".")
            if declared.get(name) not in ROLES:
                raise ConfigError(
                    f"parameter {full} has the role {declared.get(name)!r}; set "
                    f"{type(module).__name__}.parameter_roles[{name!r}] to one of "
                    f"{', '.join(ROLES)}"
                )
            roles[full] = declared[name]
    return roles
