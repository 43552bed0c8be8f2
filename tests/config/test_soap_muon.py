"""The file beside the recipe soap-muon, against its formula in float64, written by loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from speedrun.config.code import load
from speedrun.config.resolve import resolve

Array = np.ndarray[Any, np.dtype[np.float64]]
A, B, C = 3.4445, -4.7750, 2.0315


def slow_orthogonalize(matrix: Array) -> Array:
    """By its singular values, each of which the polynomial moves by itself."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for _ in range(5):
        s = A * s + B * s**3 + C * s**5
    return np.asarray(u @ np.diag(s) @ v)


def slow_step(weight: Array, grad: Array, state: dict[str, Array], options: dict[str, Any]) -> None:
    mu, beta, beta2 = (options[key] for key in ("momentum", "beta", "beta2"))
    rows, cols = weight.shape
    first = not state
    if first:
        state |= {
            "m": 0 * grad,
            "v": 0 * grad,
            "l": np.zeros((rows, rows)),
            "r": np.zeros((cols, cols)),
        }
    state["m"] = mu * state["m"] + grad
    step = grad + mu * state["m"]
    state["l"] = beta * state["l"] + (1 - beta) * grad @ grad.T
    state["r"] = beta * state["r"] + (1 - beta) * grad.T @ grad
    if not first:
        for basis, moment in (("p", "l"), ("q", "r")):
            state[basis] = np.linalg.qr(state[moment] @ state[basis])[0]
        p, q = state["p"], state["q"]
        rotated = np.zeros_like(weight)
        for i in range(rows):
            for j in range(cols):
                seen, wanted = p[:, i] @ grad @ q[:, j], p[:, i] @ step @ q[:, j]
                state["v"][i, j] = beta2 * state["v"][i, j] + (1 - beta2) * seen**2
                rotated[i, j] = wanted
        size = np.sqrt(state["v"])
        rotated /= size + 1e-5 * size.max()
        step = p @ rotated @ q.T
    update = slow_orthogonalize(step) * np.sqrt(max(1, rows / cols))
    for i in range(rows):
        short = options["floor"] * np.linalg.norm(weight[i]) / np.linalg.norm(update[i])
        update[i] *= max(1.0, short)
    shrunk = (update * weight >= 0) if options["cautious"] else np.ones_like(weight)
    weight -= options["lr"] * (options["weight_decay"] * shrunk * weight + update)


@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (3, 5)])
@pytest.mark.parametrize("cautious", [True, False])
def test_steps_are_those_of_the_formula(shape: tuple[int, int], cautious: bool) -> None:
    used = resolve("soap-muon").config.used_code()["optimizer.hidden"]
    options: dict[str, Any] = {**used.args, "cautious": cautious, "weight_decay": 0.5, "floor": 0.9}
    rng = np.random.default_rng(0)
    weight = 2.0 * rng.normal(size=shape)
    parameter = torch.nn.Parameter(torch.tensor(weight))
    optimizer = load(used)([parameter], **options)
    state: dict[str, Array] = {}
    for _ in range(4):
        grad = rng.normal(size=shape)
        parameter.grad = torch.tensor(grad)
        optimizer.step()
        slow_step(weight, grad, state, options)
        if "p" not in state:  # of the value 0, which a long side has several times, any would do
            for basis, side, moment in (("p", "left", "l"), ("q", "right", "r")):
                state[basis] = optimizer.state[parameter][f"{side}_basis"].numpy().copy()
                turned = state[basis].T @ state[moment] @ state[basis]
                np.testing.assert_allclose(turned, np.diag(np.diag(turned)), atol=1e-12)
        np.testing.assert_allclose(parameter.detach().numpy(), weight, rtol=1e-7, atol=1e-9)


def test_no_gradient_moves_nothing_and_a_zero_one_keeps_all_finite() -> None:
    make = load(resolve("soap-muon").config.used_code()["optimizer.hidden"])
    still, zero = (torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    zero.grad = torch.zeros(3, 2)
    optimizer = make([still, zero], floor=0.35)
    optimizer.step()
    assert torch.equal(still, torch.ones(3, 2))
    assert torch.equal(zero, torch.ones(3, 2))
    with pytest.raises(ValueError, match="without closure"):
        optimizer.step(lambda: 0.0)
