"""Saved optimizer state as plain data: matched to parameters by name, checked before it is loaded.

Between the optimizers and a file, state is {parameter name: {slot: tensor}}, every tensor whole
and the same for any number of ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from speedrun.optim.errors import OptimError

NamedState = dict[str, dict[str, Tensor]]
Groups = Sequence[Mapping[str, Any]]


def unpack(state_dict: Mapping[str, Any], groups: Groups, names: list[str]) -> NamedState:
    """The state in a torch `state_dict` for an optimizer with these param groups and names.

    Parameters are matched by name if both sides have names, else by position.
    """
    saved_groups = state_dict["param_groups"]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    sizes = [len(group["params"]) for group in groups]
    if saved_sizes != sizes:
        raise OptimError(
            f"the saved state has param groups of {saved_sizes} parameters, this optimizer of "
            f"{sizes}; build it with the groups it was saved with"
        )
    if all("param_names" in group for group in [*saved_groups, *groups]):
        names = [name for group in saved_groups for name in group["param_names"]]
    positions = [index for group in saved_groups for index in group["params"]]
    saved = state_dict["state"]
    return {name: saved.get(i, {}) for name, i in zip(names, positions, strict=True)}


def check_state(saved: NamedState, expected: Mapping[str, Mapping[str, tuple[int, ...]]]) -> None:
    """Refuse a state that is not exactly the one expected, naming the parameter and the shapes."""
    for name in [*expected, *saved]:
        if name not in saved:
            raise OptimError(f"the saved state has nothing for parameter {name}")
        if name not in expected:
            raise OptimError(f"the saved state has a parameter {name} that this optimizer has not")
        slots, wanted = saved[name], expected[name]
        if set(slots) != set(wanted):
            raise OptimError(
                f"the saved state of parameter {name} holds {_listed(slots)}, but its optimizer "
                f"needs {_listed(wanted)}; was it saved under other options?"
            )
        for slot, shape in wanted.items():
            if tuple(slots[slot].shape) != shape:
                raise OptimError(
                    f"the saved {slot} of parameter {name} has shape {tuple(slots[slot].shape)}, "
                    f"but the parameter needs {tuple(shape)}; use the model it was saved with"
                )


def merge_options(
    saved_groups: Groups, groups: Groups, fixed: tuple[str, ...], kept: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Each group with its saved options, except those `kept` as they are here.

    `fixed` options say how a parameter is read; a saved state that differs in one is refused.
    """
    skip = {"params", "param_names", *fixed, *kept}
    merged = []
    for number, (saved, ours) in enumerate(zip(saved_groups, groups, strict=True)):
        for key in fixed:
            if key in ours and saved.get(key, ours[key]) != ours[key]:
                raise OptimError(
                    f"group {number} was saved with {key}={saved[key]}, but this optimizer has "
                    f"{key}={ours[key]}; build it as it was saved"
                )
        merged.append({**ours, **{k: v for k, v in saved.items() if k not in skip}})
    return merged


def _listed(slots: Iterable[str]) -> str:
    return ", ".join(sorted(slots)) or "nothing"
