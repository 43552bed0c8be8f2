"""Muon against its rivals, side by side: torch's, our own without batches, and the matmul peak.

torch.optim.Muon always computes in bf16. Some virtual machines announce bf16 matrix instructions
(AMX) that then kill the process, so it is timed in child processes, each with another limit on the
instructions that oneDNN may use, together with ours in the same child. `speedup_vs_torch` is the
figure of the first limit under which torch's survives, the least restrictive first; the limit is
named in `torch_limit`. `speedup_vs_torch_no_bf16` is for processors without bf16 instructions.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from functools import partial

import torch
from torch.nn import Parameter

from speedrun.bench.timing import Figures, take_turns
from speedrun.optim import (
    AdamOptions,
    CombinedOptimizer,
    Muon,
    MuonOptions,
    orthogonalize,
    refuse_non_finite,
)
from speedrun.optim.layout import update_scale
from speedrun.optim.orthogonalize import matmul_flops

LIMITS = ("none", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2")
NO_BF16 = "AVX2"


def hidden_matrices(width: int, layers: int) -> list[Parameter]:
    """q, k, v, o and an MLP of four times the width per layer, with gradients."""
    g = torch.Generator().manual_seed(0)
    square, up, down = (width, width), (4 * width, width), (width, 4 * width)
    params = [
        Parameter(0.02 * torch.randn(shape, generator=g))
        for _ in range(layers)
        for shape in (square, square, square, square, up, down)
    ]
    for param in params:
        param.grad = torch.randn(param.shape, generator=g)
    return params


# What disturbs a run can only add to its time.
fastest = partial(take_turns, summary=min)


class UnbatchedLoop:
    """The same update and the same check of the gradients, one matrix at a time."""

    def __init__(self, params: Iterable[Parameter], lr: float = 0.02, mu: float = 0.95) -> None:
        self.lr, self.mu = lr, mu
        self.momenta = {param: torch.zeros_like(param) for param in params}

    @torch.no_grad()
    def step(self) -> None:
        refuse_non_finite((str(i), param) for i, param in enumerate(self.momenta))
        for param, momentum in self.momenta.items():
            assert param.grad is not None
            momentum.lerp_(param.grad, 1 - self.mu)
            update = orthogonalize(param.grad.lerp(momentum, self.mu))
            rows, cols = param.shape
            param.add_(update, alpha=-self.lr * update_scale("spectral", rows, cols))


def measure_muon(repeats: int = 9) -> Figures:
    """Ratios of one Muon step on the hidden matrices of GPTs; above 1 is in our favour."""
    return {
        **_against_torch(repeats),
        **_against_loop(repeats),
        **_against_peak(repeats),
        "state_ratio_vs_adamw": _state_ratio(),
    }


def _against_loop(repeats: int) -> Figures:
    ours, loop = Muon(hidden_matrices(256, 6)), UnbatchedLoop(hidden_matrices(256, 6))
    seconds = fastest({"ours": ours.step, "loop": loop.step}, repeats)
    speedup = seconds["loop"] / seconds["ours"]
    return {"speedup_vs_loop": speedup, "step_seconds_256": seconds["ours"]}


def _against_peak(repeats: int) -> Figures:
    """Products really done (the Gram form saves some) per second, over the best matmul's."""
    params = hidden_matrices(768, 1)
    a, out = torch.randn(1536, 1536), torch.empty(1536, 1536)
    seconds = fastest(
        {"step": Muon(params).step, "matmul": lambda: torch.mm(a, a, out=out)}, repeats
    )
    shapes = [param.shape for param in params]
    flops = sum(matmul_flops(rows, cols, gram=rows != cols) for rows, cols in shapes)
    peak = 2 * 1536**3 / seconds["matmul"]
    return {
        "peak_share_768": flops / seconds["step"] / peak,
        "peak_gflops": peak / 1e9,
        "step_seconds_768_layer": seconds["step"],
    }


def _state_ratio() -> float:
    params = [(str(i), param, "hidden") for i, param in enumerate(hidden_matrices(64, 2))]
    muon = CombinedOptimizer(params, {"hidden": MuonOptions(lr=0.02)})
    adamw = CombinedOptimizer(params, {"hidden": AdamOptions(lr=1e-3)})
    return muon.state_bytes() / adamw.state_bytes()


def _against_torch(repeats: int) -> Figures:
    found: Figures = {}
    for limit in LIMITS:
        answer = _child(limit, layers=6, repeats=repeats)
        if isinstance(answer, float):
            found = {"speedup_vs_torch": answer, "torch_limit": limit, **found}
            break
        found[f"torch_under_{limit}"] = answer
    if found.get("torch_limit") != NO_BF16:
        # One layer and few repeats: here torch takes two seconds for each.
        found["speedup_vs_torch_no_bf16"] = _child(NO_BF16, layers=1, repeats=8)
    return found


def _child(limit: str, *, layers: int, repeats: int) -> float | str:
    """torch's seconds over ours under a limit, or what became of the child."""
    env = {key: value for key, value in os.environ.items() if key != "ONEDNN_MAX_CPU_ISA"}
    if limit != "none":
        env["ONEDNN_MAX_CPU_ISA"] = limit
    numbers = map(str, (torch.get_num_threads(), layers, repeats))
    command = [sys.executable, "-m", "speedrun.bench.muon", *numbers]
    try:
        child = subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, timeout=180
        )
    except subprocess.TimeoutExpired:
        return "not done after 180 s"
    if child.returncode < 0:
        return f"killed by {signal.Signals(-child.returncode).name}"
    if child.returncode > 0:
        return (child.stderr.strip().splitlines() or ["no message"])[-1]
    seconds = json.loads(child.stdout)
    return float(seconds["torch"] / seconds["ours"])


if __name__ == "__main__":
    threads, layers, repeats = map(int, sys.argv[1:])
    torch.set_num_threads(threads)
    ours = Muon(hidden_matrices(256, layers))
    torchs = torch.optim.Muon(hidden_matrices(256, layers), lr=0.02)
    print(json.dumps(fastest({"ours": ours.step, "torch": torchs.step}, repeats)))
