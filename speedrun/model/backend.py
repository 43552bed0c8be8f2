"""Which code computes attention on a device, and what that code needs before the first step.

    flex    FlexAttention, compiled: CUDA.
    blocks  our own block-sparse attention: CPU (model/block_sparse.py).
    dense   the full T x T mask: the reference, for tests, short rows and other devices.

`choose_backend` only decides, so a dry run or a report may ask it. `prepare_backend` does what
takes time or changes the process, and is called once by whoever trains or measures.
"""

import ctypes
import sys
from typing import Literal, get_args

import torch

from speedrun.config.architecture import BLOCK
from speedrun.errors import ConfigError, quoted
from speedrun.model import block_sparse, native

Backend = Literal["flex", "blocks", "dense"]
DENSE_TOKENS = 4096  # a mask of 16.8 million pairs per row; four times that per doubling


def choose_backend(
    device: torch.device,
    requested: str = "auto",
    *,
    tokens: int,
    dtype: torch.dtype = torch.float32,
    rehearsal: bool = False,
) -> tuple[Backend, str]:
    """The backend for rows of `tokens` tokens, and why it was chosen.

    In a rehearsal a CPU is given what a GPU would be given.
    """
    if requested not in ("auto", *get_args(Backend)):
        allowed = ", ".join(("auto", *get_args(Backend)))
        raise ConfigError(
            f"attention backend {quoted(requested)} is unknown; choose one of {allowed}."
        )
    kind = "cuda" if rehearsal else device.type
    default: Backend = {"cuda": "flex", "cpu": "blocks"}.get(kind, "dense")  # type: ignore[assignment]
    chosen: Backend = default if requested == "auto" else requested  # type: ignore[assignment]
    wrong = ""
    if chosen == "flex" and kind != "cuda":
        wrong = f"has no backward on {kind}; use {default!r} there"
    elif chosen == "blocks" and kind != "cpu":
        wrong = f"runs on cpu only; use {default!r} on {kind}"
    elif chosen == "blocks" and dtype != torch.float32:
        wrong = f"computes in torch.float32, not {dtype}; set the precision to fp32 on cpu"
    elif chosen == "dense" and tokens > DENSE_TOKENS:
        wrong = (
            f"holds every pair of a row and takes at most {DENSE_TOKENS} tokens, not {tokens}; "
            "shorten the rows or use 'blocks' (cpu) or 'flex' (cuda)"
        )
    if wrong:
        raise ConfigError(f"attention backend {chosen!r} {wrong}.")
    return chosen, f"chosen for {kind}" if requested == "auto" else "asked for"


def prepare_backend(backend: Backend, head_dim: int) -> str:
    """Build the kernels and set up the allocator as the backend needs; says what will run."""
    if backend == "flex":
        return f"compiled FlexAttention on full and partial {BLOCK}-token blocks"
    if backend == "dense":
        return f"every pair of at most {DENSE_TOKENS} tokens, masked"
    kept = _keep_freed_memory()
    kernel = block_sparse.kernel_for(head_dim)
    if isinstance(kernel, str):
        chunk = block_sparse.CHUNK
        how = f"torch's CPU flash attention on chunks of {chunk} queries"
        if isinstance(native.load(), str):
            how += " and torch code for norms, products and the loss"
        how += f", slower than the native kernels, because {kernel}"
    else:
        how = f"native kernel {kernel.built}" + (f", {kernel.note}" if kernel.note else "")
    return how + (", freed memory kept for the next step" if kept else "")


def _keep_freed_memory() -> bool:
    """Tell glibc's malloc to hand nothing back to the system between steps.

    It returns every buffer above 32 MB when freed, and each step then pays for zeroed pages anew:
    at 65,536 tokens (67 MB per tensor) a third of the time of forward and backward.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    m_trim_threshold, m_mmap_max = -1, -4
    return bool(mallopt(m_mmap_max, 0)) and bool(mallopt(m_trim_threshold, 2**31 - 1))
