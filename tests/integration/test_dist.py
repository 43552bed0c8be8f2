"""What `make dist` makes: whole, the same bytes each time, and at work where no source tree is."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from speedrun import __version__
from speedrun.model.native import cpu

pytestmark = pytest.mark.timeout(900)  # each builds all kernels, or starts many processes
ROOT = Path(__file__).parents[2]
PREBUILT = "speedrun/model/native/prebuilt/"
TEXT = "".join(f"{n} times {n} is {n * n}, and {n} more is {n * n + n}.\n" for n in range(4000))
TRAIN = (
    "train", "best", "--track", "nano", "--steps", "3", "data.dir=mine", "validation.tokens=512",
    "batch.tokens=512", "batch.length=128", "attention.window_end=128", "machine.threads=1",
)  # fmt: skip


def make(out: Path) -> Path:
    words = [sys.executable, "-m", "tools.packaging.make", str(out)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / ".git").exists():
        pytest.skip("NOT TESTED: make dist, which works in a git checkout")
    return make(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For all installations."""
    return tmp_path_factory.mktemp("home")


def wheel_in(dist: Path, platform: str) -> Path:
    found = list(dist.glob(f"speedrun-{__version__}-py3-none-{platform}*.whl"))
    if not found:
        pytest.skip("NOT TESTED: a wheel with prebuilt kernels, which are made on x86-64 Linux")
    (wheel,) = found
    return wheel


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def tracked(*under: str) -> set[str]:
    words = ["git", "-C", str(ROOT), "ls-files", "-z", *under]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).exists()}


def test_nothing_is_forgotten_and_nothing_slips_in(dist: Path) -> None:
    package = tracked("speedrun")
    assert names_in(wheel_in(dist, "any")) == package
    with tarfile.open(dist / f"speedrun-{__version__}.tar.gz") as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked() <= files
    made = {name for name in files - tracked() if name and (ROOT / name).is_file()}
    assert made == set(), "files that git does not know"


def test_the_platform_wheel_has_kernels_besides(dist: Path) -> None:
    kernels = {f"{PREBUILT}{level}.so" for level in cpu.LEVELS} | {f"{PREBUILT}manifest.json"}
    assert names_in(wheel_in(dist, "manylinux")) == tracked("speedrun") | kernels


def test_the_same_tree_gives_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    again = make(tmp_path)
    names = sorted(path.name for path in dist.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    for name in names:
        assert (dist / name).read_bytes() == (again / name).read_bytes(), name


class Installed:
    """A wheel in an environment of its own, which shares the packages of this one; no compiler."""

    def __init__(self, wheel: Path, folder: Path, home: Path) -> None:
        self.folder, self.home = folder, home
        environment = folder / "venv"
        venv.create(environment, symlinks=True)
        (packages,) = environment.glob("lib/python*/site-packages")
        shared = [path for path in sys.path if path.endswith("-packages")]
        # Packages that are installed for editing are no folders here, so ours is not among them.
        (packages / "shared.pth").write_text("\n".join(shared) + "\n")
        self.bin = environment / "bin"
        words = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install",
                 "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)]  # fmt: skip
        subprocess.run(words, check=True, capture_output=True)
        self.package = packages / "speedrun"

    def run(self, *words: str) -> str:
        """What the command prints, in a folder that is not ours and with nothing else on PATH."""
        kept = {x: os.environ[x] for x in ("OMP_NUM_THREADS", "TMPDIR") if x in os.environ}
        variables = {"PATH": str(self.bin), "HOME": str(self.home), "LANG": "C.UTF-8",
                     "COLUMNS": "400", "CUDA_VISIBLE_DEVICES": "", **kept}  # fmt: skip
        done = subprocess.run(
            [str(self.bin / "speedrun"), *words],
            cwd=self.folder, env=variables, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.mark.parametrize("platform", ["any", "manylinux"])
def test_a_wheel_works_without_source_and_compiler(
    platform: str, dist: Path, home: Path, tmp_path: Path
) -> None:
    installed = Installed(wheel_in(dist, platform), tmp_path, home)
    best = next((level for level in cpu.LEVELS if cpu.lacking(level) == frozenset()), None)
    expected = "no C++ compiler (g++ or clang++) is found; install g++"
    if platform == "manylinux" and best is not None:
        expected = f"prebuilt for {best}"
    assert f"speedrun {__version__}" in installed.run("--version")
    assert expected in installed.run("doctor")
    (tmp_path / "text.txt").write_text(TEXT)
    installed.run("data", "build", "text.txt", "--out", "mine", "--tokenizer", "byte")
    trained = installed.run(*TRAIN, "--run", "short")
    assert expected in trained
    assert "step 3/3" in trained
    installed.run("report", "short", "--out", "page.html")
    assert (tmp_path / "page.html").read_text().lstrip().lower().startswith("<!doctype html>")
    if platform == "manylinux":
        libraries = {path.suffix for path in home.rglob("*") if path.is_file()}
        assert ".so" not in libraries, "nothing was built"


def test_an_edited_kernel_is_built_and_not_taken_prebuilt(
    dist: Path, home: Path, tmp_path: Path
) -> None:
    installed = Installed(wheel_in(dist, "manylinux"), tmp_path, home)
    with (installed.package / "model/native/draw.h").open("a") as file:
        file.write("// another\n")
    said = installed.run("doctor")
    assert "no C++ compiler (g++ or clang++) is found" in said
    assert "prebuilt for" not in said
