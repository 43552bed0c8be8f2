"""The command line called in this process: what it prints and the code it ends with."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from speedrun.cli import main


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    def sentence(self, code: int, *words: str) -> None:
        """It was one sentence of the user's mistake, with these words in it."""
        assert self.code == code, self
        assert len(self.err.splitlines()) == 1, self.err
        for word in words:
            assert word in self.err


Call = Callable[..., Said]


def caller(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*words: str | Path, **variables: str) -> Said:
        threshold = gc.get_threshold()
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["speedrun", *map(str, words)])
            for name, value in variables.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                main()
        gc.set_threshold(*threshold)
        out, err = capsys.readouterr()
        return Said(int(ended.value.code or 0), out, err)

    return call
