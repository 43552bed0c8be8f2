"""Block-sparse attention against dense causal attention on this CPU, forward and backward.

Four heads of 64, a window of four 128-token blocks, documents of 250 to 750 tokens. Rivals take
turns in one process and medians are compared, so that a slow minute slows both.

Legend: B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from speedrun.model.attention import attend, choose_backend, plan_attention

HEADS, WIDTH, WINDOW = 4, 64, 4


def mixed_documents(tokens: int, seed: int = 0) -> Tensor:
    """(1, T) document numbers, lengths drawn evenly from 250 to 750."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(250, 751, (tokens // 250 + 1,), generator=generator)
    ends = lengths.cumsum(0)
    return torch.searchsorted(ends, torch.arange(tokens), right=True).to(torch.int32)[None]


def sparse_round(tokens: int) -> Callable[[], None]:
    """One forward and backward, mask building included."""
    q, k, v, gradient = inputs(tokens)
    documents_BT, window = mixed_documents(tokens), torch.tensor(WINDOW, dtype=torch.int32)

    def run() -> None:
        plan = plan_attention("blocks", documents_BT, window)
        torch.autograd.grad(attend(q, k, v, plan, WIDTH**-0.5), (q, k, v), gradient)

    return run


def dense_round(tokens: int) -> Callable[[], None]:
    q, k, v, gradient = inputs(tokens)

    def run() -> None:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), gradient)

    return run


def inputs(tokens: int) -> list[Tensor]:
    """q, k, v and an output gradient, laid out as a model lays them out: heads inside tokens."""
    parts = [torch.randn(1, tokens, HEADS, WIDTH).transpose(1, 2) for _ in range(4)]
    return [x.requires_grad_() for x in parts[:3]] + parts[3:]


def interleaved(rounds: dict[str, tuple[Callable[[], None], int]], turns: int) -> dict[str, float]:
    """Median seconds of each rival; `n` runs of it per turn, after one run to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in rounds}
    for run, _ in rounds.values():
        run()
    for _ in range(turns):
        for name, (run, n) in rounds.items():
            for _ in range(n):
                begun = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - begun)
    return {name: median(values) for name, values in seconds.items()}


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def extra_bytes(tokens: int) -> int:
    """Peak memory of a forward and backward above the inputs; for a process of its own."""
    choose_backend(torch.device("cpu"), tokens=tokens, head_dim=WIDTH)
    sparse_round(256)()
    run = sparse_round(tokens)
    before = _peak_bytes()
    run()
    return _peak_bytes() - before


def measure_attention(turns: int = 5) -> dict[str, float | int | str]:
    """Speed against dense, growth of the time per token, and memory at 65,536 tokens."""
    with multiprocessing.get_context("spawn").Pool(1) as child:
        extra = child.apply(extra_bytes, (65_536,))
    _, reason = choose_backend(torch.device("cpu"), tokens=65_536, head_dim=WIDTH)
    figures: dict[str, float | int | str] = {}
    for tokens, dense_turns in ((8192, turns), (16_384, min(turns, 3))):
        times = interleaved(
            {"sparse": (sparse_round(tokens), 5), "dense": (dense_round(tokens), 1)}, dense_turns
        )
        figures[f"speedup_{tokens}"] = times["dense"] / times["sparse"]
        figures[f"ms_{tokens}"] = times["sparse"] * 1e3
        figures[f"dense_ms_{tokens}"] = times["dense"] * 1e3
    times = interleaved(
        {"short": (sparse_round(8192), 8), "long": (sparse_round(65_536), 1)}, turns
    )
    figures["per_token_growth_65536"] = times["long"] / times["short"] / 8
    figures["ms_65536"] = times["long"] * 1e3
    figures["extra_bytes_65536"] = extra
    figures["threads"] = torch.get_num_threads()
    figures["backend"] = reason
    return figures
