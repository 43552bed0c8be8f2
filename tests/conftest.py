"""A tiny world that trains in a second: generated text, a byte tokenizer, a two-layer model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from speedrun.config.resolve import resolve
from speedrun.config.schema import Config

# The same examples every time: a test that passes here passes everywhere. To look for new ones:
# HYPOTHESIS_PROFILE=default. An example may take its time: machines are slow and busy.
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

TINY = (
    "model.layers=2", "model.width=32", "model.heads=2", "batch.length=64", "batch.tokens=256",
    "validation.tokens=512", "validation.every=4", "train.steps=8", "train.target=5.0",
    "train.threads=1",
)  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Datasets that tests build go nowhere near the user's own."""
    os.environ["SPEEDRUN_HOME"] = str(tmp_path_factory.mktemp("home"))


def make_tiny_dataset(root: Path) -> Path:
    """Forty documents of arithmetic, about 60 kB, in bytes."""
    from speedrun.data.build import build_dataset

    for index in range(40):
        lines = [f"{index} + {n} = {index + n}\n" for n in range(120)]
        (root / f"{index:02d}.txt").write_text("".join(lines))
    build_dataset([str(root / "*.txt")], root / "dataset", "byte")
    return root / "dataset"


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_dataset(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny(tiny_dataset: Path) -> Callable[..., Config]:
    def make(*overrides: str, recipe: str = "modern") -> Config:
        return resolve(recipe, "nano", [*TINY, f"data.dir={tiny_dataset}", *overrides]).config

    return make
