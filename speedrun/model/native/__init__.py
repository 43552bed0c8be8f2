"""The C++ kernels, prebuilt or built on this machine at first use (find.py), and how to call them.

Where there is no compiler, torch code computes the same, slower: attention forward and backward
takes 121 ms instead of 48 (8,192 tokens, documents of 500), and 59 instead of 32 on sixteen rows of
512.
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speedrun.model.native.build import Build
from speedrun.model.native.find import SWITCH, build_or_find, find_kernels
from speedrun.model.native.prebuilt import Found
from speedrun.model.native.signatures import checked

__all__ = ["MAX_WIDTH", "SWITCH", "WIDTH_STEP", "Kernel", "load", "load_build", "refuse", "run"]

WIDTH_STEP, MAX_WIDTH = 16, 256  # the kernel works on whole vectors of the head dimension


class _Strided(ctypes.Structure):
    """struct Tensor of attention.cpp."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("row", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("token", ctypes.c_int64),
    )


@dataclass(frozen=True)
class View:
    """A (B, H, T, K) tensor passed with its strides; the last must be 1."""

    tensor: Tensor


Shape = tuple[int, int, int, int, int]  # struct Shape of attention.cpp
Argument = View | Shape | Tensor | int | float | None


def _as_c(x: Argument) -> object:
    if isinstance(x, View):
        return ctypes.byref(_Strided(x.tensor.data_ptr(), *x.tensor.stride()[:3]))
    if isinstance(x, tuple):
        return (ctypes.c_int64 * len(x))(*x)
    if isinstance(x, Tensor):
        return ctypes.c_void_p(x.data_ptr())
    if isinstance(x, int):
        return ctypes.c_int64(x)
    return None if x is None else ctypes.c_float(x)


BAD_VALUE = 1  # answers a routine that has done nothing; any other number but 0: sizes
UNKNOWN_ID = "every target must be an id of the vocabulary"
BAD_FIRST_KEY = "first keys must not decrease along a row nor pass their query"


def refuse(name: str, code: int, bad_value: str) -> None:
    """Raise what a routine has answered, unless it is 0."""
    if code:
        sizes = f"these are sizes that {name} cannot compute with"
        raise ValueError(bad_value if code == BAD_VALUE else sizes)


class Kernel:
    """The loaded library. Attention takes (B, H, T, K) in any layout with a unit stride in K."""

    def __init__(self, found: Found) -> None:
        self._library = found.library
        threads = "OpenMP" if found.library.openmp() else "its own threads"
        self.lanes: int = found.library.lanes()
        self.built = f"{found.built}, vectors of {self.lanes}, {threads}"
        self.why, self.note = found.why, found.note

    def invoke(self, name: str, arguments: Sequence[Argument]) -> int:
        """Call a routine with its C arguments, adding the number of threads; 0 means success.

        Nothing is checked here: what C++ is told of sizes and places must be true.
        """
        code: int = getattr(self._library, name)(*map(_as_c, arguments), torch.get_num_threads())
        return code

    def run(self, name: str, *arguments: Tensor | float | None) -> None:
        """Call a routine of signatures.py, with tensors made contiguous."""
        refuse(name, self.invoke(name, checked(name, arguments)), UNKNOWN_ID)

    def attention(
        self, name: str, q: Tensor, k: Tensor, v: Tensor, first: Tensor, *rest: Tensor | float
    ) -> None:
        """Call `attention_forward` or `attention_backward` of attention.cpp."""
        B, H, T, K = q.shape
        G = k.shape[1]
        arguments = (q, k, v, first, *rest)
        queries, keys, sums = (B, H, T, K), (B, G, T, K), (B, H, T)
        shapes = (queries, keys, keys, (B, T), (), queries, sums, queries, queries, keys, keys)
        for x, shape in zip(arguments, shapes, strict=False):
            if not isinstance(x, Tensor):
                continue
            dtype = torch.int32 if x is first else torch.float32
            packed = x.stride(-1) == 1 if len(shape) == 4 else x.is_contiguous()
            if x.shape != shape or x.dtype != dtype or not packed:
                raise ValueError(
                    f"{name} takes one key and value a token, one first key a query: {dtype} of "
                    f"{shape} in one piece here, not {x.dtype} of {tuple(x.shape)}"
                )
        views = [View(x) if isinstance(x, Tensor) and x.dim() == 4 else x for x in arguments]
        refuse(name, self.invoke(name, [(B, H, G, T, K), *views]), BAD_FIRST_KEY)


def load_build(*builds: Build) -> Kernel | str:
    """The kernels of the first build that succeeds, or the reason why none does."""
    found = build_or_find(builds)
    return found if isinstance(found, str) else Kernel(found)


@functools.cache
def load() -> Kernel | str:
    """The kernels for this machine, built if necessary, or the reason why there are none."""
    found = find_kernels()
    return found if isinstance(found, str) else Kernel(found)


def run(name: str, *arguments: Tensor | float | None) -> None:
    """Call an elementwise routine of the kernels, which must have loaded."""
    kernel = load()
    if isinstance(kernel, str):
        raise RuntimeError(f"there are no native routines: {kernel}")
    kernel.run(name, *arguments)
