"""What each parameter is to the optimizer: hidden matrix, embedding, head, scalar and so on.

The optimizer's options are per role. A module declares roles in `parameter_roles`, in its class or
on the instance, by the name of a parameter: one of its own (`mix`) or one of a module inside it
(`gate.weight`). The nearest declaration counts. So no role is guessed from a name or a shape, a new
module cannot fall into the wrong group unnoticed, and modules of torch itself can be used.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from speedrun.config.optimizer import MATRIX_ROLES, ROLES, Role
from speedrun.errors import ConfigError

MATRICES: tuple[Role, ...] = (*MATRIX_ROLES, "head")  # used in matrix multiplications


def roles_of(model: nn.Module, custom: Mapping[str, str] | None = None) -> dict[str, Role]:
    """The role of each parameter by its full name; refuses a parameter without one.

    `custom`: modules that are of a user's own code, by their names in the model, and what that code
    is called.
    """
    declared = {prefix: _declared(module) for prefix, module in model.named_modules()}
    found = {name: _nearest(name, declared) for name, _ in model.named_parameters()}
    known = {name: role for name, role in found.items() if role is not None and role in ROLES}
    for name, role in found.items():
        if name not in known:
            raise ConfigError(_how_to_declare(name, role, found, model, custom or {}))
    return known


def _declared(module: nn.Module) -> dict[str, Role]:
    """By all classes of a module and by itself, so that a subclass adds to what is there."""
    found: dict[str, Role] = {}
    for one in (*reversed(type(module).__mro__), module):
        found |= vars(one).get("parameter_roles", {})
    return found


def _nearest(name: str, declared: Mapping[str, Mapping[str, Role]]) -> Role | None:
    """By the module that owns the parameter, else by the one around it, and so on."""
    parts = name.split(".")
    for length in reversed(range(len(parts))):
        inside = declared.get(".".join(parts[:length]), {})
        if (own := ".".join(parts[length:])) in inside:
            return inside[own]
    return None


def _how_to_declare(
    name: str,
    role: Role | None,
    found: Mapping[str, Role | None],
    model: nn.Module,
    custom: Mapping[str, str],
) -> str:
    what = f"parameter {name} has the role {role!r}"
    allowed = f"the roles are {', '.join(ROLES)}"
    for prefix, called in custom.items():
        if not name.startswith(f"{prefix}."):
            continue
        inside = [each for each in found if each.startswith(f"{prefix}.")]
        open_names = [each for each in inside if found[each] not in ROLES]
        roles = {
            each.removeprefix(f"{prefix}."): "hidden"
            if model.get_parameter(each).dim() > 1
            else "scalar"
            for each in open_names
        }
        written = ", ".join(f'"{each}": "{of}"' for each, of in roles.items())
        return (
            f"{called}: {what} to the optimizer; write parameter_roles = {{{written}}} in the "
            f"class of that module, or what they are to you: {allowed}"
        )
    *path, own = name.split(".")
    owner = type(model.get_submodule(".".join(path))).__name__
    return f"{what}; set {owner}.parameter_roles[{own!r}] to one of {', '.join(ROLES)}"
