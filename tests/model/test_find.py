"""Which kernels are used: prebuilt or built, for which CPU, kept where; nothing is compiled here.

The compiler is a script that answers as g++ does and writes some library, and the prebuilt ones are
that library: they are found and loaded, never called.
"""

from __future__ import annotations

import _ctypes
import json
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from speedrun.files import sha256_of
from speedrun.model.native import build, cpu, find, prebuilt
from speedrun.model.native.prebuilt import Found
from tests.room import room_for

LIBRARY = Path(getattr(_ctypes, "__file__", ""))  # any that loads
pytestmark = pytest.mark.skipif(
    not LIBRARY.is_file() or sys.platform != "linux",
    reason="NOT TESTED: this Python has no library of its own to stand for the kernels",
)
BOTH = ("x86-64-v3", "x86-64-v4")
V3, V4 = (f"flags : {' '.join(sorted(cpu.LEVELS[level]))}\n" for level in BOTH)
COMPILER = """#!/bin/sh
# Answers as a compiler does; every call is written down.
case "$*" in
  *--version*) echo "a compiler 1.0"; exit;;
  *-###*) echo '"cc1plus" "-march=WORDS"' >&2; exit;;
esac
echo "$@" >> FOLDER/calls
FAILURE
while [ "$1" != -o ]; do shift; done
exec cp LIBRARY "$2"
"""


class Machine:
    """A home, a compiler and prebuilt kernels of its own for one test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.home, self.temporary = folder / "home", folder / "temporary"
        self.temporary.mkdir()
        self.set("SPEEDRUN_HOME", str(self.home))
        self.set(find.SWITCH, "")
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))
        monkeypatch.setattr(prebuilt, "FOLDER", folder / "prebuilt")
        build.version_of.cache_clear()
        self.compiler()

    def set(self, name: str, value: str) -> None:
        self.monkeypatch.setenv(name, value)

    def cpu(self, text: str | None) -> None:
        """What /proc/cpuinfo says, or that there is none."""
        file = self.folder / "cpuinfo"
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        self.monkeypatch.setattr(cpu, "CPUINFO", file)

    def compiler(self, failure: str = "", words: str = "one") -> Path:
        """Another compiler in the place of the last; `failure` are lines of its script."""
        script = self.folder / "compiler"
        text = COMPILER.replace("FAILURE", failure).replace("WORDS", words)
        text = text.replace("FOLDER", str(self.folder)).replace("LIBRARY", str(LIBRARY))
        script.write_text(text)
        script.chmod(0o755)
        self.set("CXX", str(script))
        return script

    def calls(self) -> int:
        """How many libraries were linked so far."""
        file = self.folder / "calls"
        return file.read_text().count("-shared") if file.exists() else 0

    def kept(self) -> list[Path]:
        return sorted(self.home.glob("native/*.so"))

    def prebuild(self, *levels: str) -> Path:
        """Prebuilt kernels of the sources here; returns their folder."""
        folder = prebuilt.FOLDER
        folder.mkdir()
        for level in levels:
            shutil.copy(LIBRARY, folder / f"{level}.so")
        digests = dict.fromkeys(levels, sha256_of(LIBRARY))
        told = {"sources": build.sources_sha256(), "compiler": "g++ 12", "libraries": digests}
        (folder / "manifest.json").write_text(json.dumps(told))
        return folder

    def found(self) -> Found:
        found = find.find_kernels()
        assert isinstance(found, Found), found
        return found

    def refusal(self) -> str:
        found = find.find_kernels()
        assert isinstance(found, str)
        return found


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    yield Machine(tmp_path, monkeypatch)
    build.version_of.cache_clear()


@pytest.mark.parametrize(
    ("flags", "level", "why"),
    [
        (V4, "x86-64-v4", "this CPU is an x86-64-v4"),
        (V3, "x86-64-v3", "no x86-64-v4, it lacks avx512bw, avx512cd, avx512dq, avx512f, avx512vl"),
        (V4 + V3, "x86-64-v3", "no x86-64-v4"),
    ],
    ids=["v4", "v3", "cores of two kinds"],
)
def test_the_best_prebuilt_kernels_that_this_cpu_runs(
    machine: Machine, flags: str, level: str, why: str
) -> None:
    machine.prebuild(*BOTH)
    machine.cpu(flags)
    found = machine.found()
    assert found.built == f"prebuilt for {level} by g++ 12"
    assert why in found.why
    assert machine.calls() == 0
    assert not machine.home.exists(), "nothing has to be written"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("flags : sse2 avx\n", "this CPU is no x86-64-v3, it lacks abm, avx2"),
        (None, "does not say whether this CPU is an x86-64-v3"),
        ("Features : neon\n", "does not say whether"),
    ],
    ids=["older", "no /proc", "no flags"],
)
def test_a_cpu_that_is_not_known_to_run_them_builds(
    machine: Machine, flags: str | None, why: str
) -> None:
    machine.prebuild(*BOTH)
    machine.cpu(flags)
    found = machine.found()
    assert found.built == "built by a compiler 1.0"
    assert why in found.why


def test_an_edited_kernel_is_built(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.prebuild(*BOTH)
    machine.cpu(V4)
    copy = machine.folder / "sources"
    shutil.copytree(build.HERE, copy)
    monkeypatch.setattr(build, "HERE", copy)
    assert machine.found().built.startswith("prebuilt")
    with (copy / "draw.h").open("a") as file:
        file.write("// another\n")
    found = machine.found()
    assert found.built == "built by a compiler 1.0"
    assert "other sources" in found.why


def test_damaged_prebuilt_kernels_are_not_loaded(machine: Machine) -> None:
    folder = machine.prebuild(*BOTH)
    machine.cpu(V4)
    (folder / "x86-64-v4.so").write_bytes(LIBRARY.read_bytes()[:20_000])
    (folder / "x86-64-v3.so").write_bytes(b"no library")
    told = json.loads((folder / "manifest.json").read_text())
    told["libraries"]["x86-64-v3"] = sha256_of(folder / "x86-64-v3.so")
    (folder / "manifest.json").write_text(json.dumps(told))
    found = machine.found()
    assert found.built.startswith("built by")
    assert "x86-64-v4.so is damaged" in found.why
    assert "x86-64-v3.so does not load" in found.why
    for text in ("", "[]", '{"sources": 1}', '{"sources": "", "compiler": "", "libraries": []}'):
        (folder / "manifest.json").write_text(text)
        assert "is damaged" in machine.found().why


def test_the_switch(machine: Machine) -> None:
    machine.prebuild("x86-64-v3")
    machine.cpu(V3)
    for value, expected in (
        ("1", "prebuilt for x86-64-v3"),
        ("native", "built by a compiler"),
        ("x86-64-v3", "prebuilt for x86-64-v3"),
        ("x86-64", "built by a compiler"),
    ):
        machine.set(find.SWITCH, value)
        assert machine.found().built.startswith(expected)
    assert "-march=x86-64 " in (machine.folder / "calls").read_text()
    machine.set(find.SWITCH, "x86-64-v4")
    assert "SPEEDRUN_NATIVE=x86-64-v4 is set and this CPU lacks avx512bw" in machine.refusal()
    machine.set(find.SWITCH, "0")
    assert machine.refusal() == "SPEEDRUN_NATIVE=0 is set"
    machine.set(find.SWITCH, "x86-64-v3")
    machine.cpu(None)  # the user knows
    assert machine.found().built.startswith("prebuilt for x86-64-v3")


def test_a_change_of_any_source_is_another_build(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = machine.folder / "sources"
    shutil.copytree(build.HERE, copy)
    monkeypatch.setattr(build, "HERE", copy)
    made = build.Build((str(machine.compiler()),), "x86-64")
    names = {made.name()}
    files = [path for path in copy.iterdir() if path.suffix in (".h", ".cpp")]
    for path in files:
        with path.open("a") as file:
            file.write("\n")
        names.add(made.name())
    assert len(names) == 1 + len(files)
    for path in files:
        for name in re.findall(r'#include "(.+)"', path.read_text()):
            assert (copy / name) in files, f"{path.name} includes {name}, which is not in the hash"


def test_two_kinds_of_cpus_share_a_home(machine: Machine) -> None:
    for flags, count in ((V3, 1), (V4, 2), (V3, 2), (V4, 2)):
        machine.cpu(flags)
        machine.found()
        assert machine.calls() == count
        assert len(machine.kept()) == count
    # Nor does ccache, which keeps objects by the words of a call, take one for the other.
    calls = (machine.folder / "calls").read_text()
    assert len(set(re.findall(r"-DSPEEDRUN_CPU=\w+", calls))) == 2
    # Where /proc says nothing, the compiler does: its -march=native is another one there.
    machine.cpu(None)
    for words, count in (("znver3", 3), ("znver4", 4), ("znver3", 4)):
        machine.compiler(words=words)
        machine.found()
        assert machine.calls() == count


def test_a_cpu_that_nobody_names_keeps_nothing(machine: Machine) -> None:
    """Its library could be another CPU's, which may lack instructions of it."""
    machine.cpu(None)
    machine.compiler().write_text(machine.compiler().read_text().replace("-march", "what"))
    assert "no telling which CPU this is" in machine.found().note
    assert machine.kept() == []
    assert list(machine.temporary.iterdir()) == []


def test_a_kept_library_that_is_damaged_is_built_again(machine: Machine) -> None:
    builds = build.chosen("native")
    assert not isinstance(builds, str)
    whole = LIBRARY.read_bytes()
    for number, (text, sealed) in enumerate(
        ((whole[:20_000], False), (bytes(len(whole)), False), (b"\x7fELF", True), (b"", True))
    ):
        machine.set("SPEEDRUN_HOME", str(machine.folder / f"home-{number}"))
        library = find.cache_folder() / builds[0].name()
        library.write_bytes(text)
        library.with_suffix(".sha256").write_text(sha256_of(library if sealed else LIBRARY))
        machine.found()
        assert machine.calls() == number + 1
        assert library.read_bytes() == whole


def test_a_home_that_cannot_be_written(machine: Machine) -> None:
    """Nor by root: it is a file."""
    (machine.folder / "file").write_text("")
    machine.set("SPEEDRUN_HOME", str(machine.folder / "file"))
    for count in (1, 2):
        note = machine.found().note
        assert "built again at each start" in note
        assert "set SPEEDRUN_HOME to a folder that can be written" in note
        assert machine.calls() == count
    assert list(machine.temporary.iterdir()) == [], "nothing is left behind"


def test_a_full_disk(machine: Machine) -> None:
    """As g++ says it; then another folder is tried, and then there are no kernels."""
    says = 'echo "fatal error: cannot write: No space left on device" >&2; exit 1'
    machine.compiler(f'case "$*" in *{machine.home}*) {says};; esac')
    assert "No space left on device" in machine.found().note
    assert machine.kept() == []
    machine.compiler(says)
    refusal = machine.refusal()
    assert "cannot be built: [Errno 28] No space left on device" in refusal
    assert "set SPEEDRUN_HOME or TMPDIR" in refusal


def test_a_limit_on_files_is_a_full_disk_too(machine: Machine) -> None:
    machine.cpu(V4)
    with room_for(1000):
        assert "cannot be built: [Errno 28]" in machine.refusal()
    assert machine.kept() == []
    assert machine.found().note == ""


def test_a_home_from_which_nothing_can_be_run(machine: Machine) -> None:
    """What it builds does not load there, but does from a folder for temporary files."""
    write = 'while [ "$1" != -o ]; do shift; done; echo text > "$2"; exit'
    machine.compiler(f'case "$*" in *"-o {machine.home}"*) {write};; esac')
    assert "cannot be kept" in machine.found().note
    machine.compiler(write)
    assert "a folder with room for them, from which programs may be run" in machine.refusal()


def test_compilers_of_several_words(machine: Machine) -> None:
    """Such as "ccache g++"."""
    script, wrapper = machine.compiler(), machine.folder / "wrapper"
    wrapper.write_text('#!/bin/sh\nexec "$@"\n')
    wrapper.chmod(0o755)
    machine.set("CXX", f"{wrapper} {script}")
    assert machine.found().built == "built by a compiler 1.0"
    assert len(machine.kept()) == 1


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ('g++ "', "CXX is no command (No closing quotation"),
        ("no-such-compiler", "no C++ compiler (no-such-compiler) is found; unset CXX"),
        ("true", "it says nothing and writes no library; unset CXX"),
        ("false", "false cannot build the kernels: exit 1; unset CXX"),
    ],
)
def test_compilers_that_are_none(machine: Machine, command: str, complaint: str) -> None:
    machine.set("CXX", command)
    assert complaint in machine.refusal()


@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_name_is_no_name(machine: Machine, value: str) -> None:
    machine.set("CXX", value)
    machine.set("PATH", str(machine.folder))
    refusal = machine.refusal()
    assert refusal.startswith("no C++ compiler (g++ or clang++) is found; install g++; no kernels")
    machine.compiler().rename(machine.folder / "clang++")
    machine.set("CXX", value)
    machine.set("PATH", f"{machine.folder}:/bin:/usr/bin" if shutil.which("g++") else "")
    assert build.compiler_here().endswith(("clang++", "g++"))


def test_only_openmp_is_given_up_for_good(machine: Machine) -> None:
    """A compiler that was killed, or a disk that was full, may have been so by chance."""
    machine.compiler('case "$*" in *-fopenmp*) echo "Killed signal" >&2; exit 1;; esac')
    machine.found()
    assert list(machine.home.glob("native/*.refused")) == []
    machine.compiler('case "$*" in *-fopenmp*) echo "no option -fopenmp" >&2; exit 1;; esac')
    machine.found()
    assert len(list(machine.home.glob("native/*.refused"))) == 1


def test_of_two_that_start_together_one_builds(machine: Machine) -> None:
    machine.compiler('case "$*" in *-shared*) sleep 0.2;; esac')
    found: list[Found | str] = []
    threads = [threading.Thread(target=lambda: found.append(find.find_kernels())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(one, Found) for one in found), found
    assert machine.calls() == 1
