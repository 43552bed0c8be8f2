"""How the kernels are built: vectors on every CPU, threads without OpenMP, a cache that heals."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from speedrun.model import native
from speedrun.model.fused import rms_norm
from speedrun.model.native.build import Build
from tests.waiting import PATIENCE

from . import builds
from .disassembly import Loop, innermost_loops

# Each of these does the work of its routine; compilers inline some into the next.
ROUTINES = (
    ("relu_squared_forward",),
    ("relu_squared_backward",),
    ("norm_rotate_forward",),
    ("norm_rotate_backward",),
    ("blend_forward",),
    ("blend_backward",),
    ("offset_keys_backward",),
    ("corner", "panel", "multiply"),
    ("sized", "partial_tile"),
    ("linear_forward",),
    ("qkv_forward",),
    ("qkv_backward",),
    ("mlp_forward",),
    ("mlp_backward",),
    ("row_loss", "head_loss"),
    ("lower_product", "orthogonalize"),
    ("sums_of_rows",),
    ("attend",),
    ("forward_tile", "attention_forward"),
    ("backward_tile", "attention_backward"),
)
OBJECTS = [
    pytest.param(compiler, cpu, openmp, register, id=f"{compiler}-{cpu}{'-OpenMP' * openmp}")
    for compiler in ("g++", "clang++")
    for cpu, register in (("x86-64-v3", "ymm"), ("x86-64-v4", "zmm"))
    for openmp in (True, False)
]
OBJECTS.append(pytest.param(builds.CROSS, "armv8-a", False, ".4s", id="aarch64"))
if builds.ALL not in os.environ:  # one of each width
    OBJECTS = [OBJECTS[0], OBJECTS[2]]


def hot(loops: list[Loop]) -> list[Loop]:
    """Loops that compute, leaving out those that call a function: a logarithm for each row."""
    return [loop for loop in loops if (loop.packed or loop.scalar) and not loop.calls]


def adds_to_a_diagonal(loop: Loop) -> bool:
    """Muon's polynomial has a multiple of the identity: one number a row, far from the next."""
    ours = any(name in loop.function for name in ("orthogonalize", "Matrix::"))
    return ours and all(re.match("v?addss|fadd", operation) for operation in loop.scalar)


@pytest.mark.parametrize(("compiler", "cpu", "openmp", "register"), OBJECTS)
def test_hot_loops_are_vectors(
    compiler: str, cpu: str, openmp: bool, register: str, tmp_path: Path
) -> None:
    """Built for that CPU, whatever this one is, and read off the object code."""
    if not builds.X86 and cpu.startswith("x86"):
        pytest.skip(f"NOT TESTED: {compiler} here builds for {platform.machine()}")
    objdump = "objdump" if cpu.startswith("x86") else builds.CROSS.replace("g++", "objdump")
    builds.needs(compiler, objdump)
    library = tmp_path / "kernels.so"
    if said := Build((compiler,), cpu, openmp).run(library):
        if openmp and compiler == "clang++" and "omp" in said:
            pytest.skip("NOT TESTED: clang++ has no OpenMP here")
        if re.search("bad value|unknown target CPU", said):
            pytest.skip(f"NOT TESTED: {compiler} is older than the name {cpu}")
        pytest.fail(said)
    loops = hot(innermost_loops(library, objdump))
    # A reduction's last lanes or a target's one logit may be scalar beside the vectors of a loop.
    scalar = [
        loop
        for loop in loops
        if 10 * len(loop.scalar) > len(loop.packed) and not adds_to_a_diagonal(loop)
    ]
    assert not scalar, "\n".join(f"{loop.function}: {loop.scalar}" for loop in scalar)
    full = [loop for loop in loops if any(register in operation for operation in loop.packed)]
    for names in ROUTINES:
        assert any(name in loop.function for loop in full for name in names), names


def test_a_scalar_loop_would_be_seen(tmp_path: Path) -> None:
    """The loop that g++ 12 left scalar for AVX2, and in front of it one that it did not."""
    builds.needs("g++", "objdump")
    if not builds.X86:
        pytest.skip("NOT TESTED: this needs g++ and objdump for x86")
    source, library = tmp_path / "loops.cpp", tmp_path / "loops.so"
    source.write_text(
        'extern "C" void twice(const float* x, float* y, long n) {\n'
        "  for (long i = 0; i < n; i++) y[i] = x[i] + x[i];\n"
        "}\n"
        'extern "C" void relu_squared(const float* x, float* y, long n) {\n'
        "  for (long i = 0; i < n; i++) y[i] = x[i] < 0.f ? 0.f : x[i] * x[i];\n"
        "}\n"
    )
    words = ["g++", "-O3", "-march=x86-64-v3", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(words, check=True)
    loops = hot(innermost_loops(library, "objdump"))
    assert any(loop.packed and not loop.scalar for loop in loops if loop.function == "twice")
    subprocess.run([*words, "-fno-tree-vectorize"], check=True)
    for name in ("twice", "relu_squared"):
        loops = [loop for loop in hot(innermost_loops(library, "objdump")) if loop.function == name]
        assert loops
        assert all(loop.scalar and not loop.packed for loop in loops)


def test_what_this_machine_has_is_what_is_built() -> None:
    with builds.used("this machine"):
        kernel = native.load()
        assert isinstance(kernel, native.Kernel)
        capability = torch.backends.cpu.get_cpu_capability()
        if (
            builds.X86
            and "ATEN_CPU_CAPABILITY" not in os.environ
            and native.SWITCH not in os.environ
        ):
            lanes = {"AVX512": 16, "AVX2": 8}.get(capability)
            assert lanes is None or f"vectors of {lanes}," in kernel.built


THREADS = """
import os, sys, torch
from speedrun.model import native
from speedrun.model.attention import attend
from speedrun.model.fused import relu_squared
from speedrun.model.native.build import Build
from speedrun.model.plan import plan_layer
kernel = native.load_build(Build(({compiler!r},), "native", openmp=False))
assert isinstance(kernel, native.Kernel), kernel
native.load = lambda: kernel
torch.set_num_threads(3)
x = torch.randn(3, 1_000_001)
x[0] = 1e-20
expected = x.clamp(min=0) ** 2
tasks = lambda: set(os.listdir("/proc/self/task"))
before = tasks()
assert torch.equal(relu_squared(x), expected)
assert len(tasks() - before) == 2, "two threads must help"
assert torch.equal(relu_squared(x), expected)
assert len(tasks() - before) == 2, "and the same two again"
q = torch.randn(1, 3, 300, 32)
attend(q, q, q, plan_layer("blocks", torch.zeros(1, 300, dtype=torch.int32), None), 0.2)
assert len(tasks() - before) == 2, "and for attention too"
# Helpers flush what the caller flushes, from the next call on.
assert expected[0, 0] > 0
torch.set_flush_denormal(True)
flushed = relu_squared(x)
assert not flushed[0].any() and torch.equal(flushed[1:], expected[1:])
torch.set_flush_denormal(False)
# A forked process has helpers of its own; torch's OpenMP has not, and would wait for ever.
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    torch.get_num_threads = lambda: 3
    before = tasks()
    right = torch.equal(relu_squared(x), expected)
    os._exit(0 if right and len(tasks() - before) == 2 else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_without_openmp_all_cores_are_used(compiler: str) -> None:
    builds.needs(compiler)
    if not Path("/proc/self/task").exists():
        pytest.skip("NOT TESTED: threads are counted in /proc")
    words = [sys.executable, "-c", THREADS.format(compiler=compiler)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["this machine", "own threads"])
def test_several_threads_may_call_at_once(name: str) -> None:
    with builds.used(name):
        x = torch.randn(400, 513)
        expected = rms_norm(x, 1e-6)
        wrong: list[int] = []

        def call(number: int) -> None:
            torch.set_num_threads(2)  # torch keeps one number for each thread
            wrong.extend(number for _ in range(50) if not torch.equal(rms_norm(x, 1e-6), expected))

        threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
