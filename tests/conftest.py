"""A tiny world that trains in a second: generated text, a byte tokenizer, a two-layer model."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings

from speedrun.config.resolve import resolve
from speedrun.config.schema import Config

if TYPE_CHECKING:
    from tests.report.browser import Browser
    from tests.science.board import Board

# The same examples every time: a test that passes here passes everywhere. To look for new ones:
# HYPOTHESIS_PROFILE=default. An example may take its time: machines are slow and busy.
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# Settings of a user's that would change what is tested.
UNWANTED = ("HF_HUB_OFFLINE", "DNNL_DEFAULT_FPMATH_MODE", "ONEDNN_DEFAULT_FPMATH_MODE")
LOCAL = "127.0.0.1,localhost"

TINY = (
    "model.layers=2", "model.width=32", "model.heads=2", "batch.length=64", "batch.tokens=256",
    "validation.tokens=512", "validation.every=4", "train.steps=8", "train.target=0.0",
    "machine.threads=1",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    for name in UNWANTED:
        os.environ.pop(name, None)
    os.environ |= {"NO_PROXY": LOCAL, "no_proxy": LOCAL}
    if os.environ.get("SPEEDRUN_GPU") != "1":  # what tests expect is what a CPU does
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell has what it runs in the background ignore Ctrl-C, and so would all our children.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and hasattr(os, "sched_setaffinity"):
        # A worker and its children keep to their share of the cores: runs that each take all cores
        # slow each other down tenfold.
        cores = sorted(os.sched_getaffinity(0))
        workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        if len(cores) >= workers:
            with suppress(OSError):  # a sandbox may forbid it
                share = cores[int(worker.removeprefix("gw")) :: workers]
                os.sched_setaffinity(0, share)
                torch.set_num_threads(min(torch.get_num_threads(), len(share)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow ones first: a long test that begins last leaves the other workers idle."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session", autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests build goes nowhere near the user's own, and once for all workers and children.

    What torch's compiler keeps on disk is known by the program alone and not by the CPU that it
    was compiled for, so what an earlier run left behind may be wrong for this one.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["SPEEDRUN_HOME"] = str(shared / "home")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(shared / "inductor")


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """What a test draws does not depend on which tests its worker ran before."""
    torch.manual_seed(0)


def make_tiny_dataset(root: Path) -> Path:
    """Forty documents of arithmetic, about 60 kB, in bytes; without a test."""
    from speedrun.data.build import build_dataset

    for index in range(40):
        lines = [f"{index} + {n} = {index + n}\n" for n in range(120)]
        (root / f"{index:02d}.txt").write_text("".join(lines))
    build_dataset([str(root / "*.txt")], root / "dataset", "byte", test_fraction=0.0)
    return root / "dataset"


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_dataset(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny(tiny_dataset: Path) -> Callable[..., Config]:
    def make(*overrides: str, recipe: str = "modern") -> Config:
        return resolve(recipe, "nano", [*TINY, f"data.dir={tiny_dataset}", *overrides]).config

    return make


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    from tests.report.browser import CHROMIUM, Browser

    if CHROMIUM is None:
        pytest.skip("NOT TESTED: the page in a browser, since there is no Chromium here")
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def made_board(tmp_path_factory: pytest.TempPathFactory) -> Board:
    from tests.science.board import Board  # late: it imports the trainer, few tests need it

    return Board(tmp_path_factory.mktemp("board"))


@pytest.fixture
def board(made_board: Board) -> Iterator[Board]:
    """Its honest runs are made once a module; its tracks are built in for one test at a time."""
    with made_board.tracks():
        yield made_board
