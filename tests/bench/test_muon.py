"""The bench's own parts: its loop is the same optimizer, its child survives, its figures exist."""

import pytest
import torch

from speedrun.bench.muon import UnbatchedLoop, _child, _state_ratio, hidden_matrices
from speedrun.optim import Muon


def test_the_loop_does_the_same_update() -> None:
    ours, theirs = hidden_matrices(32, 2), hidden_matrices(32, 2)
    muon, loop = Muon(ours), UnbatchedLoop(theirs)
    for _ in range(2):
        muon.step()
        loop.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_state_is_half_of_adamws() -> None:
    assert _state_ratio() == 0.5


@pytest.mark.slow
def test_a_child_tells_a_ratio_or_what_killed_it() -> None:
    answer = _child("AVX512_CORE", layers=1, repeats=1)
    assert answer if isinstance(answer, str) else answer > 0
    assert isinstance(_child("none", layers=-1, repeats=1), str)
