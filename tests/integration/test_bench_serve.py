"""`speedrun bench serve` in small: a run is trained, served, and asked by one client and eight."""

from __future__ import annotations

import math
from pathlib import Path

from speedrun.bench.serve import measure_serve
from tests.conftest import TINY


def test_serve(tiny_dataset: Path) -> None:
    words = (*TINY, f"data.dir={tiny_dataset}", "train.steps=1000")
    figures = measure_serve(1, "modern", words, tokens=6, requests=2)
    for name in ("speedup_of_eight", "speedup_of_eight_streamed"):
        assert 0 < float(figures[name]) < math.inf
