"""The kernels that the platform wheel brings: for two kinds of CPUs, on any Linux torch is for.

They are linked with what torch's own wheels need as well, libstdc++ and libgcc among it, and name
no OpenMP runtime (see native/prebuilt.py). The tag of the wheel follows from the symbols they ask
for. Linked statically, libstdc++ would bring along more recent symbols of glibc than they use.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HEADER = Path(__file__).with_name("glibc.h")
PLACE = "speedrun/model/native/prebuilt"
# Nothing that differs from one build to the next, and no symbol that is missing but OpenMP's.
LINK = ("-s", "-Wl,--build-id=none", "-Wl,-z,now")
ALLOWED = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6"}
# What a system of the tag manylinux_2_28 has at least; torch has wheels for nothing older.
OLDEST = 28
PROMISED = {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}


@dataclass(frozen=True)
class Kernels:
    files: dict[str, bytes]  # by their places in the wheel
    platform: str  # the tag


def prebuild(source: Path, work: Path) -> Kernels | str:
    """Kernels of the sources below `source`, or why there are none."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return f"they are made on x86-64 Linux, not on {platform.system()} {platform.machine()}"
    for command in ("g++", "readelf"):
        if shutil.which(command) is None:
            return f"{command} is not installed"
    sys.path.insert(0, str(source))
    from speedrun.model.native.build import HERE, Build, sources_sha256, version_of
    from speedrun.model.native.cpu import LEVELS

    assert HERE.is_relative_to(source), "the kernels of the tree that is packed, and no others"
    files, digests, tags = {}, {}, []
    for level in LEVELS:
        build = Build(("g++",), level, extra=("-include", str(HEADER)), link=LINK)
        library = work / f"{level}.so"
        if said := build.run(library):
            return f"g++ cannot build for {level}: {said}"
        files[f"{PLACE}/{library.name}"] = library.read_bytes()
        digests[level] = library.with_suffix(".sha256").read_text().strip()
        tags.append(oldest_glibc(library))
    manifest = {
        "sources": sources_sha256(),
        "compiler": version_of(("g++",)).partition("\n")[0],
        "libraries": digests,
    }
    files[f"{PLACE}/manifest.json"] = (json.dumps(manifest, indent=2) + "\n").encode()
    return Kernels(files, f"manylinux_2_{max(tags)}_x86_64")


def oldest_glibc(library: Path) -> int:
    """The minor version of the oldest glibc 2 that has all a library asks for.

    An assertion fails if it asks for what systems with that glibc need not have.
    """
    said = _readelf("--dynamic", library)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", said))
    assert needed <= ALLOWED, f"{library} needs {needed - ALLOWED}"
    newest = OLDEST
    versions = _readelf("--version-info", library)
    for kind, number in re.findall(r"Name: ([A-Z]+)_([0-9.]+)", versions):
        version = tuple(map(int, number.split(".")))
        if kind == "GLIBC":
            newest = max(newest, version[1])
        else:
            assert version <= PROMISED[kind], f"{library} asks for {kind}_{number}"
    return newest


def _readelf(option: str, library: Path) -> str:
    words = ["readelf", "--wide", option, str(library)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout
