"""The kernels as every compiler here builds them, for every CPU that runs here or is emulated."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from speedrun.model import native
from speedrun.model.native import cpu
from speedrun.model.native.build import FLAGS, HERE, Build
from speedrun.model.native.find import cache_folder

load = native.load  # what `used` puts others in place of
X86 = platform.machine() in ("x86_64", "AMD64")
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# Other compilers, and an emulated CPU, some 100 times slower: `make integration` asks for them.
ALL = "SPEEDRUN_ALL_BUILDS"
GNU, CLANG = ("this machine", "x86-64-v3", "own threads"), ("clang++", "clang++ with OpenMP")
HERE_NAMES = (*GNU, *CLANG) if ALL in os.environ else GNU
NAMES = (*HERE_NAMES, "aarch64") if ALL in os.environ else HERE_NAMES


def needs(*commands: str) -> None:
    """Skips a test where one of these is not installed."""
    for command in commands:
        if shutil.which(command) is None:
            pytest.skip(f"NOT TESTED: {command} is not installed")


def assert_threads_do_not_matter(run: Callable[[], tuple[Tensor, ...]]) -> None:
    """The same bits, whatever the number of threads."""
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3, 5):
            torch.set_num_threads(n)
            results.append(run())
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def runs_v3() -> bool:
    return cpu.lacking("x86-64-v3") == frozenset()


@functools.cache
def kernels(name: str) -> native.Kernel | str:
    """The kernels of one of NAMES, or why they are not to be had here."""
    if name == "this machine":
        return load()
    if name == "x86-64-v3":
        return _built("g++", "x86-64-v3") if runs_v3() else "this CPU is not an x86-64-v3"
    if name == "own threads":
        return _built("g++", "native", openmp=False)
    if name.startswith("clang++"):
        return _built("clang++", "native", openmp="OpenMP" in name)
    return _emulated()


def _built(compiler: str, cpu: str, *, openmp: bool = True) -> native.Kernel | str:
    if shutil.which(compiler) is None:
        return f"{compiler} is not installed"
    return native.load_build(Build((compiler,), cpu, openmp))


@contextmanager
def used(name: str) -> Iterator[None]:
    """These kernels in place of this machine's; skipped where they are not to be had."""
    kernel = kernels(name)
    if isinstance(kernel, str):
        broken = "cannot build" in kernel and not (
            name == "clang++ with OpenMP" and "omp" in kernel
        )
        (pytest.fail if broken else pytest.skip)(kernel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "load", lambda: kernel)
        yield


def _emulated() -> native.Kernel | str:
    for command in (CROSS, EMULATOR):
        if shutil.which(command) is None:
            return f"{command} is not installed"
    program = cache_folder() / f"emulate-aarch64-{os.getpid()}"  # each worker its own
    source = Path(__file__).with_name("emulate.cpp")
    flags = [flag for flag in FLAGS if flag != "-shared"]
    words = [CROSS, *flags, "-static", f"-I{HERE}", str(source), "-o", str(program)]
    made = subprocess.run(words, capture_output=True, text=True, check=False)
    return Emulated(program) if made.returncode == 0 else f"cannot build: {made.stderr[:300]}"


class Emulated(native.Kernel):
    """The kernels of another CPU, called through a pipe (emulate.cpp)."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen(
            [EMULATOR, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.lanes = self._ask("lanes", [])
        self.built = f"built by {CROSS}, vectors of {self.lanes}"

    def invoke(self, name: str, arguments: Sequence[native.Argument]) -> int:
        return self._ask(name, [*arguments, torch.get_num_threads()])

    def _ask(self, name: str, arguments: Sequence[native.Argument]) -> int:
        pipe, answers = self._process.stdin, self._process.stdout
        assert pipe is not None
        assert answers is not None
        parts, tensors = [struct.pack("<Q", len(name)), name.encode()], []
        for x in arguments:
            tensor = x.tensor if isinstance(x, native.View) else x
            if isinstance(x, tuple):
                parts.append(struct.pack("<c5q", b"s", *x))
            elif isinstance(tensor, Tensor):
                packed = tensor.detach().contiguous()
                if tensor is x:
                    parts.append(b"p")
                else:
                    parts.append(struct.pack("<c3q", b"t", *packed.stride()[:3]))
                parts += [struct.pack("<Q", packed.nbytes), packed.numpy().tobytes()]
                tensors.append(tensor)
            elif x is None:
                parts.append(b"n")
            else:
                parts.append(struct.pack("<cq" if isinstance(x, int) else "<cf",
                                         b"i" if isinstance(x, int) else b"f", x))  # fmt: skip
        pipe.write(b"".join(parts))
        pipe.flush()
        (code,) = struct.unpack("<i", answers.read(4))
        for tensor in tensors:
            array = tensor.detach().numpy()
            array[...] = np.frombuffer(answers.read(tensor.nbytes), array.dtype).reshape(
                array.shape
            )
        return int(code)
