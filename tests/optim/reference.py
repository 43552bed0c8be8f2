"""Slow twins: each fast path of the optimizers, written as its formula; and a child for bf16."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor


def polynomial_by_svd(
    G: Tensor, triples: list[tuple[float, float, float]], margin: float = 1.0
) -> Tensor:
    """What the iteration does to singular values, done to them one by one in fp64."""
    U, S, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    s = S / (margin * S.square().sum(-1, keepdim=True).sqrt() + 1e-7)
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    result: Tensor = U @ torch.diag_embed(s) @ Vh
    return result


CLASSIC = [(3.4445, -4.7750, 2.0315)] * 5


def muon_step(
    weight: Tensor,
    grad: Tensor,
    momentum: Tensor,
    neurons: Tensor | None = None,
    *,
    lr: float,
    mu: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.0,
    cautious: bool = False,
    neuron_beta: float = 0.0,
) -> None:
    """One Muon update of one matrix in place, with the SVD twin."""
    momentum.mul_(mu).add_(grad, alpha=1 - mu)
    update = (1 - mu) * grad + mu * momentum if nesterov else momentum
    rows, cols = weight.shape
    O = polynomial_by_svd(update, CLASSIC)  # noqa: E741
    if neuron_beta:
        assert neurons is not None
        O = even_out(O, neurons, neuron_beta)  # noqa: E741
    O = O.to(weight.dtype)  # noqa: E741
    mask = (O * weight >= 0).to(weight.dtype) if cautious else torch.ones_like(weight)
    weight.sub_(lr * weight_decay * weight * mask + lr * math.sqrt(max(1.0, rows / cols)) * O)


def even_out(O: Tensor, V: Tensor, beta: float) -> Tensor:  # noqa: E741
    """NorMuon neuron by neuron; V holds a number for each along the longer side."""
    tall = O.shape[0] >= O.shape[1]
    lines = []
    for i, line in enumerate(O if tall else O.T):
        V[i] = beta * V[i] + (1 - beta) * line.square().mean()
        lines.append(line / V[i].sqrt())
    scaled = torch.stack(lines, dim=0 if tall else 1)
    result: Tensor = scaled * (O.norm() / scaled.norm())
    return result


def run_bf16(program: str) -> None:
    """In a child limited to plain AVX-512: some virtual machines announce AMX but trap on it."""
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "PYTHONPATH": root}
    command = [sys.executable, "-c", program]
    child = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if child.returncode == -signal.SIGILL:
        pytest.skip("NOT TESTED: a bf16 matmul is an illegal instruction here")
    assert child.stdout.strip() == "done", child.stderr
