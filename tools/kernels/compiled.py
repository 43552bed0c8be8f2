"""Kernels compiled for a GPU that is not here: what they take of it, and whether it has that much.

The functions of speedrun/model/kernels are called with tensors that have shapes and types and no
memory (the meta device). Whatever they would launch is compiled for the chip instead, as its
launcher compiles it: the same settings, sizes that are multiples of 16 and strides of 1 known as
such, pointers that begin where torch's allocator lets them begin. Triton's driver, which knows the
GPU, is replaced by one that states it. Registers and spills are what ptxas says.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from speedrun.model.kernels import launch

KIB = 1024
# By compute capability: shared memory that one block of threads may have.
SHARED = {80: 163 * KIB, 90: 227 * KIB, 100: 227 * KIB}
TENSOR_MEMORY = 512  # columns of it, on capability 10


class DoesNotFitError(Exception):
    """A kernel asks for more than the chip has."""


@dataclass(frozen=True)
class Compiled:
    name: str
    arch: int  # compute capability, ten times
    threads: int
    registers: int  # of a thread
    shared: int  # bytes
    tensor_memory: int  # columns
    spills: int  # bytes stored or loaded, since registers did not suffice
    ptx: str

    def check(self) -> None:
        """Refuse what the chip cannot launch, and what spills."""
        if self.shared > SHARED[self.arch]:
            raise DoesNotFitError(
                f"{self.name} takes {self.shared / KIB:.1f} KiB of shared memory, and "
                f"sm_{self.arch} has {SHARED[self.arch] // KIB}"
            )
        if self.tensor_memory > TENSOR_MEMORY:
            raise DoesNotFitError(
                f"{self.name} takes {self.tensor_memory} columns of tensor memory, and there are "
                f"{TENSOR_MEMORY}"
            )
        if self.spills:
            raise DoesNotFitError(f"{self.name} spills {self.spills} bytes on sm_{self.arch}")


def compiled(call: Callable[[], object], arch: int) -> list[Compiled]:
    """Everything that a call on the meta device would launch, compiled for a chip.

    What cannot be compiled at all raises as Triton does.
    """
    found: list[Compiled] = []

    def compile_only(kernel: Any, _: tuple[int, ...], *arguments: Any, **settings: Any) -> None:
        found.append(_compile(kernel, arch, arguments, settings))

    def capability(_: Tensor) -> tuple[int, int]:
        return divmod(arch, 10)

    with mock.patch.multiple(launch, start=compile_only, capability=capability):
        call()
    assert found, "nothing was launched"
    return found


def _compile(kernel: Any, arch: int, arguments: Any, settings: Any) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Stated:
        """The driver of a GPU that is not here."""

        def get_current_device(self) -> int:
            return arch  # by which Triton keeps what it compiled

        def get_current_stream(self, _: int) -> int:
            return 0

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", arch, 32)

    said = io.StringIO()
    before = driver._active
    driver.set_active(Stated())
    kernel.device_caches.pop(arch, None)
    # Anew each time, for ptxas to say what it did; the launcher compiles with the same words.
    knobs = triton.knobs
    try:
        with (
            knobs.compilation.scope(),
            knobs.nvidia.scope(),
            redirect_stdout(said),
        ):
            knobs.compilation.always_compile = True
            knobs.nvidia.dump_ptxas_log = True
            binary = kernel.warmup(*arguments, grid=(1,), enable_fp_fusion=True, **settings)
    finally:
        driver._active = before
    return _read(binary, arch, said.getvalue())


def _read(binary: Any, arch: int, said: str) -> Compiled:
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert registers is not None, said
    assert spills is not None, said
    metadata = binary.metadata
    return Compiled(
        name=metadata.name,
        arch=arch,
        threads=metadata.num_warps * 32,
        registers=int(registers[1]),
        shared=metadata.shared,
        tensor_memory=metadata.tmem_size or 0,
        spills=int(spills[1]) + int(spills[2]),
        ptx=binary.asm["ptx"],
    )


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor that is there for its shape."""
    return torch.empty(shape, dtype=dtype, device="meta")
