"""Builds the C++ kernels on this machine at first use, and calls them.

Two files without dependencies, so a compiler call of about three seconds is the whole build, kept
under $SPEEDRUN_HOME by a name made of everything that shaped it. Attention takes 48 ms where the
torch path takes 121 (8,192 tokens, documents of 500, forward and backward) and 32 against 59 on
sixteen rows of 512; where there is no compiler the torch paths take over.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

SOURCES = tuple(Path(__file__).with_name(name) for name in ("attention.cpp", "fused.cpp"))
FLAGS = (
    "-O3", "-march=native", "-fno-math-errno", "-std=c++17", "-fopenmp", "-shared", "-fPIC",
)  # fmt: skip
SWITCH = "SPEEDRUN_NATIVE"  # 0 in the environment: never build or load
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

    def __init__(self, library: Path, compiler: str) -> None:
        self.compiler = compiler
        self._library = ctypes.CDLL(str(library))

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


def _processor() -> str:
    """What -march=native depends on, so that a home folder shared by machines stays safe."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))})
    )


def _folder() -> Path | None:
    home = Path(os.environ.get("SPEEDRUN_HOME") or "~/.cache/speedrun")
    try:
        folder = home.expanduser() / "native"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # read-only, or no home at all
        return None
    return folder


@functools.cache
def load() -> Kernel | str:
    """The kernel, built if need be, or the reason why there is none."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 is set"
    named = os.environ.get("CXX")
    compiler = next(filter(None, map(shutil.which, [named] if named else ["g++", "clang++"])), None)
    if compiler is None:
        return f"no C++ compiler ({named or 'g++ or clang++'}) is found"
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    texts = [source.read_text() for source in SOURCES]
    parts = (*texts, version.stdout, " ".join(FLAGS), _processor())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    home, name = _folder(), f"kernels-{key}.so"
    if home is None or not ((home / name).exists() or os.access(home, os.W_OK)):
        home = Path(tempfile.mkdtemp(prefix="speedrun-"))
    library = home / name
    if not library.exists():
        # Ranks that start together each build their own file; the last rename wins.
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            fresh = Path(folder) / library.name
            command = [compiler, *FLAGS, *map(str, SOURCES), "-o", str(fresh)]
            built = subprocess.run(command, capture_output=True, text=True, check=False)
            if built.returncode != 0:
                names = ", ".join(source.name for source in SOURCES)
                return f"{compiler} cannot build {names}: {built.stderr.strip()[:200]}"
            fresh.replace(library)
    try:
        return Kernel(library, version.stdout.partition("\n")[0])
    except OSError as error:
        return f"{library} does not load: {error}"


def run(name: str, *arguments: Tensor | float | None) -> None:
    """Call a routine of the kernels, which must be there."""
    kernel = load()
    assert isinstance(kernel, Kernel), kernel
    kernel.run(name, *arguments)
