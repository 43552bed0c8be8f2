"""A ladder of two entries on a tiny track, one of them an optimizer in a file of a user's own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from speedrun.commands.ladder import ladder_command, write_document
from speedrun.errors import ConfigError
from speedrun.science import children
from speedrun.science.rule import next_place
from speedrun.science.rungs import Verdicts, cells_of, read_ladder
from tests.train.children import QuickChild

TRACK = """
extends = "optimizer"
sigma = 0.02
[data]
dir = "{data}"
[model]
layers = 2
width = 32
[batch]
length = 64
tokens = 256
[validation]
tokens = 512
every = 50
[train]
steps = 50
target = 2.0
"""
MINE = """
import torch

class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    mean = self.state[one].setdefault("mean", torch.zeros_like(one))
                    mean.lerp_(one.grad, 1 - group["beta"])
                    one.sub_(mean.sign(), alpha=group["lr"])
"""


def test_rows_are_made_measured_and_found_again(
    tmp_path: Path, tiny_dataset: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(children, "Child", QuickChild)
    (tmp_path / "tiny.toml").write_text(TRACK.format(data=tiny_dataset))
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.toml").write_text(
        'extends = "adamw"\n[optimizer.hidden]\nuse = "mine.py:Signs"\nargs = { lr = 0.003 }\n'
    )
    go = partial(
        ladder_command, recipes=["adamw", str(tmp_path / "mine.toml")],
        tracks=[str(tmp_path / "tiny.toml")], out=tmp_path / "out", write=None, spread=None,
        retune=False,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="has no row of these with a result: make them without"):
        go(clock=2, tuned=None, seeds=2, first_seed=3, jobs=None)
    rows = partial(go, tuned=2, seeds=2, first_seed=3, jobs=2, clock=None)
    rows()
    file = tmp_path / "out" / "ladder-tiny.json"
    found = read_ladder(file)
    verdicts = Verdicts(found)
    assert {*verdicts.results} == {"adamw", "mine"}
    for name, result in verdicts.results.items():
        rung = found.rung(name)
        assert rung is not None
        assert rung.tuned is not None
        assert rung.tuned.trials == 2
        assert rung.state_bytes
        assert {seed for by_seed in rung.losses.values() for seed in by_seed} == {3, 4}
        assert result.crossing.n == 2
        assert result.steps in rung.losses
        cells, start = cells_of(verdicts.searches[name]), min(cells_of(verdicts.searches[name]))
        assert next_place(cells, found.target, found.sigma, start) is None
    mine = found.rung("mine")
    assert mine is not None
    assert mine.optimizer == "mine.py:Signs"
    assert "optimizer.hidden.code" in mine.settings
    # The same again makes no run, and says the same.
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    rows()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")} == stamps
    assert read_ladder(file).rungs == found.rungs
    go(clock=2, tuned=None, seeds=2, first_seed=3, jobs=None)
    timed = read_ladder(file).rungs
    assert [len(rung.timed) for rung in timed] == [2, 2]
    assert all(run.seconds > 0 for rung in timed for run in rung.timed)
    write_document(tmp_path / "out", tmp_path / "page.md")
    assert "`mine.py:Signs`" in (tmp_path / "page.md").read_text()
    (tmp_path / "tiny.toml").write_text(TRACK.format(data=tiny_dataset).replace("2.0", "2.1"))
    with pytest.raises(Exception, match=r"a table with target = 2\.0, and this would be one with"):
        rows()
    assert "fewer than" in capsys.readouterr().out
