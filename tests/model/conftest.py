"""Which kernels a test computes with: this machine's, or every build's in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from speedrun.model import products

from . import builds


@pytest.fixture(scope="module", params=builds.NAMES)
def _each_build(request: pytest.FixtureRequest) -> Iterator[None]:
    with builds.used(request.param):
        yield


@pytest.fixture
def _this_machine() -> Iterator[None]:
    with builds.used("this machine"):
        yield


@pytest.fixture
def _however_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native products even of fewer rows than repay them."""
    monkeypatch.setattr(products, "FEWEST", 1)
