"""Angles of rotary positions, and which coordinates they rotate."""

import math

import pytest
import torch

from speedrun.model.fused import rotate
from speedrun.model.rotary import Rotary, frequencies


def test_half_rotary_rotates_half_the_coordinates_at_the_stated_angles() -> None:
    rotary, x = Rotary(128, 300, half=True), torch.randn(1, 2, 300, 128)
    y = rotate(x, *rotary.angles(0, 300), None)
    unrotated = [*range(32, 64), *range(96, 128)]
    assert torch.equal(y[..., unrotated], x[..., unrotated])
    for t, j in ((1, 0), (7, 5), (299, 31)):
        angle = t * 1024 ** (-j / 31)
        c, s = math.cos(angle), math.sin(angle)
        a, b = x[0, 0, t, j].item(), x[0, 0, t, j + 64].item()
        assert y[0, 0, t, j].item() == pytest.approx(a * c + b * s, abs=1e-4)
        assert y[0, 0, t, j + 64].item() == pytest.approx(b * c - a * s, abs=1e-4)


def test_rotary_angles_and_norms() -> None:
    f = frequencies(64, half=False)
    assert f[0] == 1.0
    assert f[5].item() == pytest.approx(10000 ** (-10 / 64), rel=1e-6)
    rotary, x = Rotary(64, 50, half=False), torch.randn(1, 1, 50, 64)
    turned = rotate(x, *rotary.angles(0, 50), None)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    late = rotate(x[:, :, 20:23], *rotary.angles(20, 3), None)
    torch.testing.assert_close(late, turned[:, :, 20:23])
