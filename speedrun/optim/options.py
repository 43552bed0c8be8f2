"""From the declared options of an optimizer to its checks, its signature and its help.

The declarations are pydantic classes (speedrun/config/optimizer.py), so that an option has one
name, type, range, default and description in recipes, in Python and in error messages.
"""

from collections.abc import Mapping
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar

from pydantic import ValidationError

from speedrun.config.optimizer import UpdateOptions
from speedrun.optim.errors import OptimError

OptimizerClass = TypeVar("OptimizerClass", bound=type)


def read_options(declared: type[UpdateOptions], given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option with its checked value: the given one, else the default."""
    unknown = sorted(set(given) - set(declared.names()))
    if unknown:
        raise OptimError(
            f"{unknown[0]} is not an option of {declared.kind}; "
            f"its options are {', '.join(declared.names())}"
        )
    try:
        return declared.model_validate(dict(given)).values()
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        value = given.get(name, declared.model_fields[name].default)
        allowed = first["msg"].replace("Input should", "it must")
        description = declared.model_fields[name].description
        raise OptimError(f"{name} is {value!r}, but {allowed} [{description}]") from None


def documented(cls: OptimizerClass) -> OptimizerClass:
    """Show the declared options in an optimizer's signature, after `params`, and in its help."""
    declared: type[UpdateOptions] = cls.options  # type: ignore[attr-defined]
    params, _lr, *others = signature(cls.__bases__[0]).parameters.values()
    shown, lines = [params], []
    for name in declared.names():
        field = declared.model_fields[name]
        kind = Parameter.POSITIONAL_OR_KEYWORD if name == "lr" else Parameter.KEYWORD_ONLY
        shown.append(Parameter(name, kind, default=field.default))
        lines.append(f"    {name:<14} {field.description} ({field.default!r})")
    shown += [other for other in others if other.kind is Parameter.KEYWORD_ONLY]
    cls.__signature__ = Signature(shown)  # type: ignore[attr-defined]
    about = f"{cls.__doc__}".rstrip()
    cls.__doc__ = "\n".join([about, "", "    Options, each with its default:", "", *lines])
    return cls
