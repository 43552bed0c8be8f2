"""docs/own-technique.md from outside: killed, resumed, on ranks, raced, sampled and compiled."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from speedrun.config.resolve import resolve
from speedrun.config.schedule import window_at
from speedrun.model.gpt import GPT
from speedrun.model.parts import Parts
from speedrun.model.plan import AttentionPlanner
from speedrun.train.run import RunFolder
from tests.conftest import TINY
from tests.documents import ROOT, write_files
from tests.train.heard import losses, same_bits, tensors
from tests.waiting import PATIENCE, wait_for

# It draws random numbers and, where there is a file `hold`, waits after the first checkpoint to be
# killed.
DROPPED = """
import time
from pathlib import Path
from torch.nn.functional import dropout
from speedrun.model.block import Block

class Dropped(Block):
    def __init__(self, config, layer, share=0.1):
        super().__init__(config, layer)
        self.share = share

    def forward(self, x, *rest):
        while Path("hold").exists() and any(Path("run/checkpoints").glob("step-*")):
            time.sleep(0.01)
        y, values = super().forward(x, *rest)
        return x + dropout(y - x, self.share, self.training), values
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the page has its reader write, and the block above."""
    write_files(ROOT / "docs/own-technique.md", tmp_path)
    (tmp_path / "dropped.py").write_text(DROPPED)
    (tmp_path / "mine.toml").write_text(
        'extends = "around.toml"\n[custom.block]\nuse = "dropped.py:Dropped"\n'
    )
    return tmp_path


def speedrun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "speedrun", *words]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)


def words(folder: Path, dataset: Path, run: str, recipe: str = "mine.toml") -> list[str]:
    sizes = [*TINY, "model.layers=4", "train.steps=40", f"data.dir={dataset}"]
    return ["train", str(folder / recipe), *sizes, "--track", "nano", "--run", run,
            "--sample-tokens", "0", "--checkpoint-every", "5"]  # fmt: skip


def test_killed_and_resumed_when_the_file_is_gone(folder: Path, tiny_dataset: Path) -> None:
    whole = speedrun(folder, *words(folder, tiny_dataset, "whole"))
    assert whole.returncode == 0, whole.stderr
    assert "custom.block dropped.py:Dropped (" in whole.stdout + whole.stderr
    (folder / "hold").touch()
    line = [sys.executable, "-m", "speedrun", *words(folder, tiny_dataset, "run")]
    child = subprocess.Popen(line, cwd=folder, stdout=subprocess.DEVNULL)
    checkpoints = folder / "run/checkpoints"
    wait_for(lambda: any(checkpoints.glob("step-*")), "a checkpoint")
    child.send_signal(signal.SIGKILL)
    child.wait(PATIENCE)
    (folder / "hold").unlink()
    assert RunFolder(folder / "run").read_summary() is None
    (folder / "dropped.py").unlink()
    (folder / "around.py").write_text("raise SystemExit\n")
    resumed = speedrun(folder, "train", "--resume", "--run", "run", "--sample-tokens", "0")
    assert resumed.returncode == 0, resumed.stderr
    said = resumed.stdout + resumed.stderr
    assert "dropped.py is gone since the run began" in said
    assert "around.py was changed since the run began" in said
    assert losses(folder / "run") == losses(folder / "whole")
    assert same_bits(tensors(folder / "run"), tensors(folder / "whole"))
    sampled = speedrun(folder, "sample", "run", "--tokens", "8", "--prompt", "a")
    assert sampled.returncode == 0, sampled.stderr
    assert "code of the run's own is run here, too: custom.block" in sampled.stderr
    assert "custom.attention around.py:Gated (" in sampled.stderr


def test_two_ranks_and_a_resume(folder: Path, tiny_dataset: Path) -> None:
    line = [*words(folder, tiny_dataset, "ranks"), "--ranks", "2"]
    first = speedrun(folder, *line, "--stop-after", "12")
    assert first.returncode == 0, first.stderr
    resumed = speedrun(folder, "train", "--resume", "--run", "ranks", "--ranks", "2",
                       "--sample-tokens", "0")  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    again = [*words(folder, tiny_dataset, "again"), "--ranks", "2"]
    assert speedrun(folder, *again).returncode == 0
    assert same_bits(tensors(folder / "ranks"), tensors(folder / "again"))


def test_a_race_against_best(folder: Path, tiny_dataset: Path) -> None:
    small = [*TINY, "model.layers=4", "train.target=5.0", f"data.dir={tiny_dataset}"]
    sets = [part for word in small for part in ("--set", word)]
    line = ["race", "best", "swiglu.toml", "--track", "pico", "--seeds", "2", *sets]
    done = speedrun(folder, *line)
    assert done.returncode == 0, done.stderr
    again = speedrun(folder, *line)
    assert again.stdout.count("found finished") == 4
    source = folder / "gated.py"
    source.write_text(source.read_text() + "# another experiment\n")
    changed = speedrun(folder, *line)
    assert changed.stdout.count("found finished") == 2, changed.stdout  # those of best
    page = speedrun(folder, "report", "races/race", "--out", "page.html")
    assert page.returncode == 0, page.stderr
    assert "gated.py:SwiGLU (" in (folder / "page.html").read_text()


@pytest.mark.parametrize("recipe", ["swiglu.toml", "around.toml"])
def test_one_graph_with_the_rest(folder: Path, recipe: str) -> None:
    sizes = ["model.width=64", "model.heads=2", "machine.attention=blocks"]
    config = resolve(str(folder / recipe), "pico", sizes).config
    torch.manual_seed(0)
    model = GPT(config.model, 257, config.batch.length, Parts.of(config))
    planner = AttentionPlanner(config, torch.device("cpu"))
    planner.set_window(window_at(config, 0))
    ids = torch.randint(0, 257, (2, config.batch.length))
    plan = planner.plan(torch.zeros_like(ids, dtype=torch.int32))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    found = compiled(ids, plan, ids)
    found.backward()
    torch.testing.assert_close(found, model(ids, plan, ids))
    assert counter.frame_count == 1
