"""KellerJordan's Muon and ours train the same toy to the same weights, with the real package."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from speedrun.optim import Muon
from tests.optim.test_public_muons import fp32, make_toy, trained, weights_of

__all__ = ["fp32"]


@pytest.mark.usefixtures("fp32")
@pytest.mark.parametrize(
    "options", [{}, {"lr": 0.05, "momentum": 0.8}, {"lr": 0.03, "weight_decay": 0.1}]
)
def test_the_same_weights_as_keller_jordans_in_fp32(options: dict[str, Any]) -> None:
    theirs = import_module("muon").SingleDeviceMuon
    found = trained(lambda params: Muon(params, **options))
    expected = trained(lambda params: theirs(params, **options))
    moved = (expected - weights_of(make_toy())).abs().max()
    assert (found - expected).abs().max() < 1e-4 * moved
