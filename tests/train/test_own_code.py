"""Runs with code of a user's own: kept with the run, resumed exactly, named where it is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from speedrun.commands.compare import compare_command
from speedrun.commands.runs import runs_command
from speedrun.config.code import UsedCode, copy_of, found, package_hash
from speedrun.config.experiment import differences
from speedrun.config.own_code import own_code, with_code, with_copies, with_installed
from speedrun.config.resolve import change, from_toml
from speedrun.config.schema import Config
from speedrun.errors import ConfigError, RunError
from speedrun.report.page import page_data
from speedrun.serve.load import load_run
from speedrun.serve.slots import Slots
from speedrun.train.run import RunFolder
from tests.train import jobs
from tests.train.children import on_ranks
from tests.train.heard import Heard, Make, losses, newest, same_bits, tensors, train, values

SOURCE = """
import random
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from speedrun.model.loss import Loss

def mlp(inner, layer, share=0.2):
    class Both(nn.Module):
        parameter_roles = {"gate": "scalar"}
        def __init__(self):
            super().__init__()
            self.inner, self.gate = inner, nn.Parameter(torch.full((), 0.1))
        def forward(self, x, norm):
            drawn = random.random() + np.random.rand() if self.training else 1.0
            added = drawn * self.gate * (self.inner(x, norm) - x)
            return x + F.dropout(added, share, self.training)
    return Both()

class Weighed(Loss):
    parameter_roles = {"weight": "scalar"}

    def __init__(self, config, push=1.0):
        super().__init__(config)
        self.weight, self.push = nn.Parameter(torch.zeros(())), push

    def training_loss(self, x, head, targets):
        loss = super().training_loss(x, head, targets)
        return loss * (1 + self.push * self.weight.square()) + self.weight.square()

def rate(step, total, power=1.0):
    return (1 - step / total) ** power
"""
NAMED = {"mlp": "mlp", "loss": "Weighed", "schedule": "rate"}


def words(folder: Path, source: str = SOURCE, **parts: str) -> list[str]:
    (folder / "mine.py").write_text(source)
    return [f"custom.{part}.use={folder}/mine.py:{name}" for part, name in parts.items()]


def test_a_run_goes_on_exactly_with_its_own_copy(tiny: Make, tmp_path: Path) -> None:
    config = tiny(*words(tmp_path, **NAMED), "custom.schedule.args.power=2.0")
    train(config, tmp_path / "whole")
    train(config, tmp_path / "run", Heard(3))
    run = RunFolder(tmp_path / "run")
    copy = copy_of(config.custom.mlp, run.code)
    assert copy.read_text() == SOURCE
    for change_file, said in (("# other\n", "was changed"), (None, "is gone")):
        if change_file:
            (tmp_path / "mine.py").write_text(change_file)
        else:
            (tmp_path / "mine.py").unlink()
        stored = run.load_config()
        assert Path(stored.custom.mlp.place) == copy.parent
        heard = Heard(5)
        train(stored, tmp_path / "run", heard, resume=True)
        assert sum(f"mine.py {said} since the run began" in line for line in heard.lines) == 1
    train(run.load_config(), tmp_path / "run", resume=True)
    assert from_toml(run.config).custom.mlp.place == str(tmp_path)  # where it came from
    for kind in ("train", "val"):
        assert losses(tmp_path / "run", kind) == losses(tmp_path / "whole", kind)
    assert same_bits(tensors(tmp_path / "run"), tensors(tmp_path / "whole"))
    assert values(tmp_path / "run", "train", "lr_multiplier")[:2] == [1.0, (7 / 8) ** 2]
    with pytest.raises(ConfigError, match="its path starts at the folder of the recipe"):
        train(config, tmp_path / "other")


def test_another_code_is_another_run(tiny: Make, tmp_path: Path) -> None:
    train(tiny(*words(tmp_path, **NAMED)), tmp_path / "run", Heard(3))
    other = words(tmp_path, SOURCE + "# other\n", **NAMED)
    stored = RunFolder(tmp_path / "run").load_config()
    changed = change(stored, other, {}).config
    with pytest.raises(RunError, match=r"custom.mlp.code is '.*--force"):
        train(changed, tmp_path / "run", resume=True)
    train(changed, tmp_path / "run", resume=True, force=True)
    assert len([*(tmp_path / "run/code").iterdir()]) == 2
    assert "custom.mlp.code" in RunFolder(tmp_path / "run").read_forced()[0]


def test_a_package_that_has_changed_is_another_run(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "minepackage.py").write_text("# one\n")
    config = tiny("custom.mlp.use=minepackage:Gated")
    assert with_installed(config) == config
    (tmp_path / "minepackage.py").write_text("# another\n")
    package_hash.cache_clear()
    now = with_installed(config)
    assert [one.key for one in differences(config, now)] == ["custom.mlp.code"]


def test_it_is_named_wherever_the_run_is_shown(
    tiny: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(*words(tmp_path, **NAMED))
    folder = tmp_path / "runs/run"
    summary = train(config, folder)
    code = config.custom.mlp.code[:12]
    expected = {f"custom.{part}": f"mine.py:{name} ({code})" for part, name in NAMED.items()}
    assert own_code(config) == summary.own_code == expected
    assert newest(folder / "checkpoints").meta["own_code"] == expected
    assert RunFolder(folder).read_metrics("start")[0]["own_code"] == expected
    train(tiny(), tmp_path / "runs/plain")
    assert RunFolder(tmp_path / "runs/plain").read_summary().own_code == {}  # type: ignore[union-attr]
    runs_command([tmp_path / "runs"], sort="date", track="", recipe="", state="", as_json=False)
    assert capsys.readouterr().out.count("modern (own code)") == 1
    paths = [tmp_path / "runs" / name for name in ("plain", "run")]
    compare_command(paths, as_json=False)
    said = capsys.readouterr().out
    assert f"own code: custom.mlp mine.py:mlp ({code})" in said
    assert "custom.schedule.use" in said
    compare_command(paths, as_json=True)
    assert json.loads(capsys.readouterr().out)["sides"]["B"]["own_code"] == expected
    (tmp_path / "mine.py").unlink()
    for path in (folder / "code").rglob("*.py"):
        path.write_text("raise SystemExit")  # who looks at a page runs nothing
    page = page_data([RunFolder(folder)])
    (group,) = page["groups"]
    assert f"custom.mlp mine.py:mlp ({code})" in group["own_code"]
    assert group["schedules"]["lr"][:2] == [[0, 1.0], [1, 0.875]]


SHIFTED = """
import torch
from speedrun.model.block import MLP

class Shifted(MLP):
    def forward(self, x, norm):
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        return super().forward(x + 0.5 * before, norm)
"""


def test_a_model_that_does_not_follow_the_cache_writes_what_it_would_read(
    tiny: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    train(tiny(*words(tmp_path, SHIFTED, mlp="Shifted"), "model.zero_init_head=false"), folder)
    (tmp_path / "mine.py").unlink()
    loaded = load_run(folder)
    assert "mine.py:Shifted" in capsys.readouterr().err
    slots = Slots(loaded.model, loaded.planner, loaded.tokenizer.eot)
    assert not slots.follows_cache
    one, all_at_once = slots.take(), Slots(loaded.model, loaded.planner, loaded.tokenizer.eot)
    ids = [loaded.tokenizer.eot, *b"a text"]
    for count in range(1, len(ids) + 1):
        (logits,) = slots.feed({one: ids[count - 1 : count]}).values()
    (whole,) = all_at_once.feed({all_at_once.take(): ids}).values()
    assert logits.tolist() == pytest.approx(whole.tolist(), abs=1e-5)


def test_code_that_fails_later_is_told_with_its_step(tiny: Make, tmp_path: Path) -> None:
    late = """
from speedrun.model.block import MLP

class Late(MLP):
    calls = 0
    def forward(self, x, norm):
        Late.calls += self.training and x.size(0) > 2
        if Late.calls > 6:
            raise ValueError("too late")
        return super().forward(x, norm)
"""
    with pytest.raises(ConfigError, match=r"mine.py:Late\) fails at step 3, in line 9 of mine.py"):
        train(tiny(*words(tmp_path, late, mlp="Late")), tmp_path / "run")


EXPERTS = """
from torch import nn
from speedrun.model.block import MLP

class Experts(MLP):
    \"\"\"The first token of a row says which of two its tokens go to; many rows say the same.\"\"\"

    def __init__(self, config):
        super().__init__(config)
        self.other = MLP(config)

    def forward(self, x, norm):
        first = x[:, :1, :1] > x[:, :1, 1:2]
        out = x
        if first.any():
            out = out + first * (MLP.forward(self, x, norm) - x)
        if not first.all():
            out = out + ~first * (self.other(x, norm) - x)
        return out
"""


def test_an_expert_that_gets_no_token_on_a_rank_is_left_alone_there(
    tiny: Make, tmp_path: Path
) -> None:
    """Two rows a rank, one a pass: an expert often has none, and sometimes in one pass of two."""
    config = tiny(*words(tmp_path, EXPERTS, mlp="Experts"), "optimizer.kind=muon",
                  "batch.tokens=256", "machine.microbatch=1")  # fmt: skip
    on_ranks(2, jobs.train, tmp_path, config, tmp_path / "ranks", {"warm_up": False})
    train(config, tmp_path / "alone")
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "alone"), abs=1e-3)
    weights, others = (
        newest(tmp_path / name / "checkpoints").model() for name in ("ranks", "alone")
    )
    for name, weight in weights.items():
        assert torch.allclose(weight, others[name], atol=2e-3), name


def test_places(tmp_path: Path) -> None:
    words(tmp_path, mlp="mlp")
    used = UsedCode(use="mine.py:mlp", code=found("mine.py:mlp", tmp_path)["code"], place="there")
    config = Config()
    config = config.model_copy(update={"custom": config.custom.model_copy(update={"mlp": used})})
    assert with_copies(config, tmp_path / "code") == config  # there is no copy
    moved = with_code(config, {"custom.mlp": {"place": "elsewhere"}})
    assert not differences(config, moved)
    assert moved.custom.mlp.place == "elsewhere"
