"""Adam with decoupled weight decay, for everything that is not a hidden matrix.

The state is fp32 whatever the parameter's type and exists from the start. fp32 parameters on a CPU
or CUDA device go through torch's fused kernel, one pass over memory; the rest, bf16 tables above
all, through the same formula in fp32.
"""

from collections.abc import Callable, Iterator
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from speedrun.optim.base import UncompiledOptimizer
from speedrun.optim.errors import OptimError
from speedrun.optim.finite import refuse_non_finite
from speedrun.optim.state import NamedState, check_state, merge_options, parameter_names, unpack

SLOTS = ("exp_avg", "exp_avg_sq", "step")


class Adam(UncompiledOptimizer):
    """AdamW (plain Adam at weight_decay=0) for tensors, (name, tensor) pairs or param groups."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        check_finite: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.check_finite = check_finite
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            _check_options(param_group)
        except OptimError:
            self.param_groups.pop()
            raise
        for param in param_group["params"]:
            zeros = torch.zeros_like(param, dtype=torch.float32)
            self.state[param] = {
                "exp_avg": zeros,
                "exp_avg_sq": torch.zeros_like(zeros),
                "step": torch.zeros((), device=param.device),
            }

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.check_finite:
            refuse_non_finite((name, param) for param, name in self.named())
        for group in self.param_groups:
            fused: dict[torch.device, list[Tensor]] = {}
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.dtype == torch.float32 and param.device.type in ("cpu", "cuda"):
                    fused.setdefault(param.device, []).append(param)
                else:
                    _update_in_fp32(param, self.state[param], group)
            for params in fused.values():
                self._update_fused(params, group)
        return loss

    def _update_fused(self, params: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[param] for param in params]
        beta1, beta2 = group["betas"]
        adamw(
            params,
            [param.grad for param in params if param.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def named(self) -> Iterator[tuple[Tensor, str]]:
        for group, names in zip(self.param_groups, parameter_names(self), strict=True):
            yield from zip(group["params"], names, strict=True)

    def expected_state(self) -> dict[str, dict[str, torch.Size]]:
        """The shape of every slot, by parameter name."""
        return {
            name: {slot: self.state[param][slot].shape for slot in SLOTS}
            for param, name in self.named()
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`, fp32 state as fp32. Nothing is changed unless all of it fits."""
        saved = unpack(self, state_dict)
        check_state(saved, self.expected_state())
        options = merge_options(state_dict["param_groups"], self.param_groups, fixed=(), kept=())
        for group, chosen in zip(self.param_groups, options, strict=True):
            group.update(chosen)
        self.load_named(saved)

    @torch.no_grad()
    def load_named(self, saved: NamedState) -> None:
        """Copy checked state into place."""
        for param, name in self.named():
            for slot in SLOTS:
                self.state[param][slot].copy_(saved[name][slot])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "check_finite": self.check_finite}


def _update_in_fp32(param: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """The fused kernel's formula, operation by operation; only the last one rounds to the type."""
    assert param.grad is not None
    beta1, beta2 = group["betas"]
    exp_avg, exp_avg_sq, step = (state[slot] for slot in SLOTS)
    grad = param.grad.float()
    step.add_(1)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = exp_avg_sq.div(1 - beta2**step).sqrt_().add_(group["eps"])
    update = exp_avg.div(1 - beta1**step).div_(denominator).mul_(group["lr"])
    kept = param.float().mul_(1 - group["lr"] * group["weight_decay"])
    param.copy_(kept.sub_(update))


def _check_options(options: dict[str, Any]) -> None:
    for param in options["params"]:
        if not param.is_floating_point():
            raise OptimError(f"a parameter is {param.dtype}, but Adam needs floating point")
    beta1, beta2 = options["betas"]
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise OptimError(f"betas are {options['betas']}, but must lie in [0, 1)")
    for key in ("lr", "eps", "weight_decay"):
        if not options[key] >= 0.0:
            raise OptimError(f"{key} is {options[key]}, but must not be negative")
