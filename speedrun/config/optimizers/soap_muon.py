"""SOAP before Muon: the step that leads the public optimizer track, in one file of its own.

For a matrix W with gradient G, momentum M and everything else starting at 0:

    M <- mu M + G;                   u = G + mu M
    L <- lerp(G G^T, L, beta);       R <- lerp(G^T G, R, beta)
    P, Q = eigenvectors of L, R
    V <- lerp((P^T G Q)^2, V, beta2)
    O = orthogonalize(P [(P^T u Q) / (sqrt(V) + eps max sqrt(V))] Q^T) sqrt(max(1, rows / cols))
    each row of O no shorter than floor times the row of W
    W <- W - lr wd W [O W >= 0] - lr O

SOAP divides by the mean square in the bases in which the gradient's second moment is nearly
diagonal; Muon then makes all singular values equal. The published step keeps the norm in between,
which orthogonalising takes out again, and for the same reason V needs no correction for its start.
The eigenvectors follow L and R by one step of orthogonal iteration each time. The first step is
Muon's alone: in its own eigenvectors a gradient is diagonal, and the rest of V would be rounding.

It is a plain torch.optim.Optimizer: `use = "soap_muon.py:SoapMuon"` in a recipe beside it is all
that this trainer needs to know, and nothing here knows of the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

ROUNDS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Muon's quintic, which lifts small singular values
ROUNDING = 1e-5  # of the largest: what is smaller is no gradient, as long as L has no full rank
EPS = 1e-12


def orthogonalize(matrix: Tensor) -> Tensor:
    """About U V^T for matrix = U S V^T; 0 stays 0."""
    a, b, c = COEFFICIENTS
    wide = matrix.size(0) <= matrix.size(1)
    x: Tensor = matrix if wide else matrix.mT
    x = x / (x.norm() + EPS)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


def follow(basis: Tensor, moment: Tensor) -> Tensor:
    """The eigenvectors of a matrix that has changed a little since it had those of `basis`."""
    basis, _ = torch.linalg.qr(moment @ basis)
    return basis


class SoapMuon(torch.optim.Optimizer):
    """For matrices only; `floor` and `weight_decay` are off at 0."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.95,
        beta: float = 0.9,
        beta2: float = 0.95,
        weight_decay: float = 0.0,
        cautious: bool = True,
        floor: float = 0.0,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "beta": beta, "beta2": beta2,
                   "weight_decay": weight_decay, "cautious": cautious, "floor": floor}  # fmt: skip
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError(
                "SoapMuon takes its gradients as they are: call step() without closure"
            )
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, weight.grad, group)

    def _move(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        moments = {"left": grad @ grad.mT, "right": grad.mT @ grad}
        first = not state
        if first:
            state["momentum"], state["squares"] = torch.zeros_like(grad), torch.zeros_like(grad)
            for side, moment in moments.items():
                state[side] = torch.zeros_like(moment)
                # The largest first, as orthogonal iteration wants them; the order stays, so that
                # each column keeps its own mean squares.
                state[f"{side}_basis"] = torch.linalg.eigh(moment).eigenvectors.flip(-1)
        momentum = state["momentum"].mul_(group["momentum"]).add_(grad)
        update = grad.add(momentum, alpha=group["momentum"])
        for side, moment in moments.items():
            state[side].lerp_(moment, 1 - group["beta"])
        if not first:
            update = self._even_out(update, grad, state, group["beta2"])
        update = orthogonalize(update)
        rows, cols = weight.shape
        update *= max(1.0, rows / cols) ** 0.5
        if group["floor"]:
            least = group["floor"] * weight.norm(dim=1, keepdim=True)
            update *= (least / (update.norm(dim=1, keepdim=True) + EPS)).clamp(min=1.0)
        if group["weight_decay"]:
            shrunk = (update * weight >= 0) if group["cautious"] else 1.0
            weight.sub_(weight * shrunk, alpha=group["lr"] * group["weight_decay"])
        weight.sub_(update, alpha=group["lr"])

    def _even_out(
        self, update: Tensor, grad: Tensor, state: dict[str, Tensor], beta2: float
    ) -> Tensor:
        """SOAP: divide by the root of the mean square in the bases of left and right."""
        for side in ("left", "right"):
            state[f"{side}_basis"] = follow(state[f"{side}_basis"], state[side])
        p, q = state["left_basis"], state["right_basis"]
        squares = state["squares"].lerp_((p.mT @ grad @ q).square(), 1 - beta2)
        size = squares.sqrt()
        return p @ ((p.mT @ update @ q) / (size + ROUNDING * size.max() + EPS)) @ q.mT
