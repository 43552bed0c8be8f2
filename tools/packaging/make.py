"""`make dist`: an sdist, a wheel for any machine, and one with kernels prebuilt for x86-64 Linux.

All of it is made from a copy of the files that git knows, so that nothing else slips in; the wheel
is built from the sdist, so that one lacking a file is found out. No network: setuptools, which
constraints.txt pins, is all it takes. Dates are those of the last commit, or $SOURCE_DATE_EPOCH,
and the same tree gives the same bytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tools.packaging.archives import add_to_wheel, rewrite_sdist, rewrite_wheel
from tools.packaging.kernels import prebuild

ROOT = Path(__file__).parents[2]
EPOCH = "SOURCE_DATE_EPOCH"
BACKEND = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"make dist goes by what git knows of a checkout: {done.stderr.strip()}")
    return done.stdout


def tracked() -> list[str]:
    """The files of the project, as they are in the working tree."""
    return [name for name in git("ls-files", "-z").split("\0") if name and (ROOT / name).exists()]


def export(to: Path) -> None:
    for name in tracked():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, to / name)


def built(hook: str, tree: Path, out: Path) -> Path:
    """What a hook of setuptools makes of a source tree, in a process that sees that tree alone."""
    words = [sys.executable, "-I", "-c", BACKEND, hook, str(out)]
    done = subprocess.run(words, cwd=tree, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"setuptools fails:\n{done.stderr}")
    return out / done.stdout.splitlines()[-1]


def make(out: Path) -> list[Path]:
    """Writes the files and returns their paths; the platform wheel is made where it can be."""
    epoch = int(os.environ.setdefault(EPOCH, git("log", "-1", "--format=%ct").strip()))
    if changed := git("status", "--porcelain", "--untracked-files=no"):
        print(f"with changes that are not committed:\n{changed}", end="")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        export(work / "tree")
        sdist = built("build_sdist", work / "tree", work)
        with tarfile.open(sdist) as archive:
            archive.extractall(work / "unpacked", filter="data")
        (source,) = (work / "unpacked").iterdir()
        wheel = built("build_wheel", source, work)
        made = [
            rewrite_sdist(sdist, out / sdist.name, epoch),
            rewrite_wheel(wheel, out / wheel.name, epoch),
        ]
        kernels = prebuild(source, work)
        if isinstance(kernels, str):
            print(f"no wheel with prebuilt kernels: {kernels}")
        else:
            made.append(add_to_wheel(wheel, out, kernels.files, kernels.platform, epoch))
    return made


if __name__ == "__main__":
    for path in make(Path(sys.argv[1])):
        print(f"{path}  {path.stat().st_size / 1e3:,.0f} kB")
