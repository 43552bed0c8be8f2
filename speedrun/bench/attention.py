"""Block-sparse attention against dense causal attention on this CPU, forward and backward.

Four heads of 64, a window of four 128-token blocks, documents of 250 to 750 tokens. Rivals take
turns in one process and medians are compared, so that a slow minute slows both.

Legend: B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from speedrun.bench.timing import Figures, take_turns
from speedrun.hardware import peak_memory_bytes
from speedrun.model.attention import attend
from speedrun.model.backend import prepare_backend
from speedrun.model.mask import WindowUnit
from speedrun.model.plan import plan_layer

HEADS, WIDTH, WINDOW = 4, 64, 4


def mixed_documents(tokens: int, seed: int = 0) -> Tensor:
    """(1, T) document numbers, lengths drawn evenly from 250 to 750."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(250, 751, (tokens // 250 + 1,), generator=generator)
    ends = lengths.cumsum(0)
    return torch.searchsorted(ends, torch.arange(tokens), right=True).to(torch.int32)[None]


def sparse_round(
    tokens: int, width: int = WINDOW, unit: WindowUnit = "blocks"
) -> Callable[[], None]:
    """One forward and backward under a window of `width` units, mask building included."""
    q, k, v, gradient = inputs(tokens)
    documents_BT, window = mixed_documents(tokens), torch.tensor(width, dtype=torch.int32)

    def run() -> None:
        plan = plan_layer("blocks", documents_BT, window, unit)
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


def extra_bytes(tokens: int) -> int:
    """Peak memory of a forward and backward above the inputs; for a process of its own."""
    prepare_backend("blocks", WIDTH)
    sparse_round(256)()
    run = sparse_round(tokens)
    before = peak_memory_bytes()
    run()
    return peak_memory_bytes() - before


def measure_attention(
    turns: int = 5, lengths: tuple[int, int, int] = (8192, 16_384, 65_536)
) -> Figures:
    """Speed against dense, growth of the time per token, and memory at the longest row."""
    short, middle, long = lengths
    with multiprocessing.get_context("spawn").Pool(1) as child:
        extra = child.apply(extra_bytes, (long,))
    backend = prepare_backend("blocks", WIDTH)
    figures: Figures = {}
    for tokens, dense_turns in ((short, turns), (middle, min(turns, 3))):
        rivals = {"sparse": sparse_round(tokens), "dense": dense_round(tokens)}
        times = take_turns(rivals, dense_turns, times_per_turn={"sparse": 5})
        figures[f"speedup_{tokens}"] = times["dense"] / times["sparse"]
        figures[f"ms_{tokens}"] = times["sparse"] * 1e3
        figures[f"dense_ms_{tokens}"] = times["dense"] * 1e3
    rivals = {"short": sparse_round(short), "long": sparse_round(long)}
    times = take_turns(rivals, turns, times_per_turn={"short": long // short})
    return figures | {
        f"per_token_growth_{long}": times["long"] / times["short"] / (long / short),
        f"ms_{long}": times["long"] * 1e3,
        f"extra_bytes_{long}": extra,
        "threads": torch.get_num_threads(),
        "backend": backend,
    }
