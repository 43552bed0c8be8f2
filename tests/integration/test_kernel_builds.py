"""How the kernels are built, kept and found again; each of these builds all of them, or more."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from speedrun.model import native
from speedrun.model.fused import relu_squared
from speedrun.model.native.build import SOURCES, Build, chosen
from speedrun.model.native.find import build_or_find, cache_folder
from speedrun.model.native.prebuilt import Found
from tests.model import builds


def test_kernels_are_built_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with builds.used("this machine"):
        pass
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path))
    for _ in range(2):
        assert isinstance(native.load.__wrapped__(), native.Kernel)
        (library,) = tmp_path.glob("native/*.so")
    built = library.stat().st_mtime_ns
    native.load.__wrapped__()
    assert library.stat().st_mtime_ns == built


def test_the_second_best_is_no_substitute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that is cached does not stand in for a better one that is not."""
    with builds.used("this machine"):
        pass
    wanted = chosen("native")
    assert not isinstance(wanted, str)
    library = cache_folder() / wanted[0].name()

    def copied(_build: Build, to: Path) -> str:
        for suffix in (".so", ".sha256"):
            shutil.copy(library.with_suffix(suffix), to.with_suffix(suffix))
        return ""

    monkeypatch.setattr(Build, "run", copied)
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path))
    for asked in (wanted[1:], wanted):
        found = build_or_find(asked)
        assert isinstance(found, Found), found
        assert found.library._name == str(tmp_path / "native" / asked[0].name())


def test_a_compiler_without_openmp_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as Apple's, which refuses the option; and what it built is found the next time."""
    builds.needs("g++")
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    compiler.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\n'
        'case "$*" in *-fopenmp*) echo "unsupported option \'-fopenmp\'" >&2; exit 1;; esac\n'
        'exec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.delenv(native.SWITCH, raising=False)
    for _ in range(2):
        kernel = native.load.__wrapped__()
        assert isinstance(kernel, native.Kernel), kernel
        assert kernel.built.endswith("its own threads")
    assert calls.read_text().count("-fopenmp") == len(SOURCES)


def test_a_compiler_may_be_several_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds.needs("g++")
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "env LC_ALL=C g++ -Wall")
    monkeypatch.delenv(native.SWITCH, raising=False)
    kernel = native.load.__wrapped__()
    assert isinstance(kernel, native.Kernel), kernel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "load", lambda: kernel)
        assert relu_squared(torch.tensor([-1.0, 3.0])).tolist() == [0.0, 9.0]
