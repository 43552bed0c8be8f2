"""Optimizer state as plain data: gathered from all ranks, matched by name, loaded all or nothing.

Between the optimizers and a file, state is {parameter name: {slot: tensor}}, every tensor whole and
in its parameter's shape ('momentum' for Muon, 'exp_avg', 'exp_avg_sq' and 'step' for Adam).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from speedrun.optim.errors import OptimError
from speedrun.optim.walk import Shelf, all_gather

NamedState = dict[str, dict[str, Tensor]]


def parameter_names(optimizer: Optimizer) -> list[list[str]]:
    """The names of every group's parameters, or their positions if none were given."""
    names, position = [], 0
    for group in optimizer.param_groups:
        count = len(group["params"])
        unnamed = [f"parameter {i}" for i in range(position, position + count)]
        names.append(list(group.get("param_names", unnamed)))
        position += count
    return names


@torch.no_grad()
def gather_momenta(
    shelves: Sequence[Shelf],
    own: Mapping[Tensor, dict[str, Tensor]],
    world: int,
    rank: int,
    process_group: dist.ProcessGroup | None,
    device: str | None = None,
) -> defaultdict[Tensor, dict[str, Tensor]]:
    """Every parameter's momentum on every rank. With several ranks all of them must call this.

    `device` is where the copies go, one row at a time: the CPU spares a GPU the whole state.
    """
    full: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)
    for shelf in shelves:
        if world == 1:
            full.update((item.param, own[item.param]) for item in shelf)
            continue
        numel, home = shelf[0].param.numel(), shelf[0].param.device
        sent = torch.zeros(numel, device=home)
        received = torch.empty(world * numel, device=home)
        for start in range(0, len(shelf), world):
            row = shelf[start : start + world]
            for item in row:
                if item.owner == rank:
                    sent.copy_(own[item.param]["momentum"].view(-1))
            all_gather(received, sent, process_group).wait()
            for item in row:
                momentum = received.view(world, *item.param.shape)[item.owner]
                full[item.param]["momentum"] = momentum.to(device or home, copy=True)
    return full


def unpack(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> NamedState:
    """The state in a torch `state_dict`, by this optimizer's parameter names.

    Parameters are matched by name if both sides have names, else by position.
    """
    saved_groups = state_dict["param_groups"]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if saved_sizes != sizes:
        raise OptimError(
            f"the saved state has param groups of {saved_sizes} parameters, this optimizer of "
            f"{sizes}; build it with the groups it was saved with"
        )
    named = all("param_names" in g for g in [*saved_groups, *optimizer.param_groups])
    names = (
        [name for group in saved_groups for name in group["param_names"]]
        if named
        else [name for names in parameter_names(optimizer) for name in names]
    )
    positions = [index for group in saved_groups for index in group["params"]]
    saved = state_dict["state"]
    return {name: saved.get(i, {}) for name, i in zip(names, positions, strict=True)}


def check_state(saved: NamedState, expected: Mapping[str, Mapping[str, torch.Size]]) -> None:
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
                f"needs {_listed(wanted)}; was it saved under other rules?"
            )
        for slot, shape in wanted.items():
            if slots[slot].shape != shape:
                raise OptimError(
                    f"the saved {slot} of parameter {name} has shape {tuple(slots[slot].shape)}, "
                    f"but the parameter needs {tuple(shape)}; use the model it was saved with"
                )


def merge_options(
    saved_groups: Sequence[Mapping[str, Any]],
    groups: Sequence[dict[str, Any]],
    *,
    fixed: Iterable[str],
    kept: Iterable[str],
) -> list[dict[str, Any]]:
    """What to set in each group: the saved options, except those `kept` as they are here.

    `fixed` options say how a parameter is read; a saved state that differs in one is refused.
    """
    skip = {"params", "param_names", *fixed, *kept}
    for number, (saved, ours) in enumerate(zip(saved_groups, groups, strict=True)):
        for key in fixed:
            if key in ours and _plain(saved.get(key, ours[key])) != _plain(ours[key]):
                raise OptimError(
                    f"group {number} was saved with {key}={saved[key]}, but this optimizer has "
                    f"{key}={ours[key]}; build it as it was saved"
                )
    return [{k: v for k, v in saved.items() if k not in skip} for saved in saved_groups]


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _listed(slots: Iterable[str]) -> str:
    return ", ".join(sorted(slots)) or "nothing"
