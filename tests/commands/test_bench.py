"""`speedrun bench`: figures as text and as JSON, and names that are not known."""

from __future__ import annotations

import json

import pytest

from speedrun.commands import bench
from speedrun.errors import ConfigError

FIGURES = {"speedup": 12.3456789, "threads": 2, "backend": "blocks"}
MACHINE = {"cpu": "Zen", "instructions": "AVX2"}


@pytest.fixture(autouse=True)
def _one_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BENCHES", {"loader": lambda: FIGURES, "mask": lambda: FIGURES})
    monkeypatch.setattr(bench, "machine", lambda: MACHINE)


def test_figures_as_aligned_text(capsys: pytest.CaptureFixture[str]) -> None:
    bench.bench_command("loader", as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "bench loader", "  speedup       12.3457", "  threads       2", "  backend       blocks",
        "  cpu           Zen", "  instructions  AVX2",
    ]  # fmt: skip
    bench.bench_command("", as_json=False)
    assert [line for line in capsys.readouterr().out.splitlines() if line[0] != " "] == [
        "bench loader", "bench mask",
    ]  # fmt: skip


def test_json_is_one_flat_object(capsys: pytest.CaptureFixture[str]) -> None:
    bench.bench_command("loader", as_json=True)
    assert json.loads(capsys.readouterr().out) == {**FIGURES, **MACHINE}


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'loadr' is not known; nearest: 'loader'"):
        bench.bench_command("loadr", as_json=False)
    with pytest.raises(ConfigError, match=r"--json needs one name: loader, mask"):
        bench.bench_command("", as_json=True)
