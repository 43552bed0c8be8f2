"""The C++ kernels, built on this machine at first use (build.py), and how to call them.

Where there is no compiler the torch paths take over: attention forward and backward takes 48 ms
here where the torch path takes 121 (8,192 tokens, documents of 500), and 32 against 59 on sixteen
rows of 512.
"""

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from speedrun.model.native.build import SWITCH, Build, build_or_find, chosen

__all__ = ["MAX_WIDTH", "SWITCH", "WIDTH_STEP", "Kernel", "load", "load_build", "run"]

WIDTH_STEP, MAX_WIDTH = 16, 256  # the kernel works on whole vectors of the head dimension


class _View(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("row", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("token", ctypes.c_int64),
    )


def _view(x_BHTK: Tensor) -> _View:
    assert x_BHTK.stride(3) == 1
    assert x_BHTK.dtype == torch.float32
    return _View(x_BHTK.data_ptr(), *x_BHTK.stride()[:3])


def _plain(x: Tensor | float | None) -> object:
    if isinstance(x, Tensor):
        assert x.dtype in (torch.float32, torch.int64)
        return ctypes.c_void_p(x.data_ptr())
    if isinstance(x, int):
        return ctypes.c_int64(x)
    return None if x is None else ctypes.c_float(x)


class Kernel:
    """The loaded library. Attention takes (B, H, T, K) in any layout with a unit stride in K."""

    def __init__(self, library: ctypes.CDLL, compiler: str) -> None:
        self._library = library
        threads = "OpenMP" if library.openmp() else "its own threads"
        self.built = f"{compiler}, vectors of {library.lanes()}, {threads}"

    def _call(self, name: str, q: Tensor, k: Tensor, views: Sequence[Tensor | float]) -> None:
        """Arguments in the order of the C signature: 4-d tensors as views, the rest as pointers."""
        B, H, T, K = q.shape
        assert k.shape == (B, k.shape[1], T, K), "one row of keys per row of queries"
        assert views[2].shape == k.shape, "one value per key"  # type: ignore[union-attr]
        assert views[3].shape == (B, T), "one first key per query"  # type: ignore[union-attr]
        assert H % k.shape[1] == 0, "query heads share key heads evenly"
        arguments: list[object] = [(ctypes.c_int64 * 5)(B, H, k.shape[1], T, K)]
        for x in views:
            if not isinstance(x, Tensor):
                arguments.append(ctypes.c_float(x))
            elif x.dim() == 4:
                arguments.append(ctypes.byref(_view(x)))
            else:
                assert x.is_contiguous()
                assert x.dtype in (torch.int32, torch.float32)
                arguments.append(ctypes.c_void_p(x.data_ptr()))
        bad = getattr(self._library, name)(*arguments, torch.get_num_threads())
        assert bad == 0, "first keys must not decrease along a row nor pass their query"

    def run(self, name: str, *arguments: Tensor | float | None) -> None:
        """Any other routine, with the arguments of its C signature; tensors are packed first."""
        packed = [x.contiguous() if isinstance(x, Tensor) else x for x in arguments]
        bad = getattr(self._library, name)(*map(_plain, packed), torch.get_num_threads())
        assert bad == 0, "every target must be an id of the vocabulary"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, first: Tensor, scale: float, out: Tensor, lse: Tensor
    ) -> None:
        self._call("attention_forward", q, k, (q, k, v, first, scale, out, lse))

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        first: Tensor,
        scale: float,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        self._call("attention_backward", q, k, (q, k, v, first, scale, out, lse, dout, dq, dk, dv))


def load_build(build: Build) -> Kernel | str:
    """The kernels of one build, or the reason why there are none."""
    library = build_or_find(build)
    if isinstance(library, str):
        return library
    return Kernel(library, build.version().partition("\n")[0])


@functools.cache
def load() -> Kernel | str:
    """The kernels for this machine, built if need be, or the reason why there are none."""
    build = chosen()
    return build if isinstance(build, str) else load_build(build)


def run(name: str, *arguments: Tensor | float | None) -> None:
    """Call a routine of the kernels, which must be there."""
    kernel = load()
    assert isinstance(kernel, Kernel), kernel
    kernel.run(name, *arguments)
