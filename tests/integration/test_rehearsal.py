"""The CUDA configuration from end to end: rehearsed on a CPU, and the same on a GPU where one is.

bf16 products, FlexAttention forward and backward, one compiled graph over a growing window, ranks,
checkpoints. What no CPU has are the GPU's kernels and its pinned, asynchronous copies.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from speedrun.commands import rehearse
from speedrun.config.schedule import settings_at
from speedrun.config.schema import Config
from speedrun.model.linear import Norm
from speedrun.train.build import choose_device
from speedrun.train.health import agree
from speedrun.train.run import RunFolder
from speedrun.train.signals import Pending
from speedrun.train.trainer import Trainer
from speedrun.train.world import World
from tests.train import jobs
from tests.train.children import on_ranks, speedrun
from tests.train.heard import Make, losses, newest, same_bits, tensors
from tests.train.waits import NoWaits
from tests.waiting import PATIENCE

TOY = ("model.layers=4", "model.width=64", "batch.length=512", "batch.tokens=1024",
       "validation.tokens=1024", "validation.every=8", "train.steps=24")  # fmt: skip
WIDER = (*TOY, "model.width=128")  # gradients of several buckets
RECIPES = ("baseline", "record-09", "record-13", "record-18", "best")
DEVICES = ["rehearsal", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("NOT TESTED: there is no GPU that torch can use; where there is: make gpu")
    return str(request.param)


def train_there(world: World, config: Config, folder: Path, how: dict[str, object] | None) -> None:
    jobs.train(replace(world, device=choose_device(config.machine.device)), config, folder, how)


def train_and_count_buckets(world: World, config: Config, folder: Path) -> None:
    share = Trainer.share_gradients

    def shared(self: Trainer) -> None:
        share(self)
        assert isinstance(self.parallel, DistributedDataParallel)
        cap = self.parallel.bucket_bytes_cap
        size = sum(4 * parameter.numel() for parameter in self.model.parameters())
        assert size > 2 * cap, "a toy must have several buckets, as a large model has"

    Trainer.share_gradients = shared  # type: ignore[method-assign]
    train_there(world, config, folder, None)


def train_with_a_constant(world: World, config: Config, folder: Path) -> None:
    """A number that the compiler takes for a constant changes every eighth step."""
    honest = Trainer.apply_settings

    def changing(self: Trainer) -> object:
        for module in self.model.modules():
            if isinstance(module, Norm):
                module.eps = 1e-6 * (1 + self.progress.step // 8)
        return honest(self)

    Trainer.apply_settings = changing  # type: ignore[method-assign, assignment]
    train_there(world, config, folder, None)


def train_with_a_look_at_a_number(world: World, config: Config, folder: Path) -> None:
    """Python asks for a number in the middle of the model: on a GPU it would wait for it."""
    honest, said = Norm.forward, ""

    def looking(self: Norm, x: Tensor) -> Tensor:
        return honest(self, x) * (2.0 if float(x.sum()) > 1e9 else 1.0)

    Norm.forward = looking  # type: ignore[method-assign]
    try:
        train_there(world, config, folder, None)
    except Exception as error:
        said = repr(error)
    (folder.parent / "said").write_text(said)


def near(found: list[float], expected: list[float]) -> bool:
    """The first third one by one; later ones on average, since differences grow by themselves."""
    apart = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    early = apart[: len(apart) // 3]
    return max(early, default=0.0) <= rehearse.TOLERANCE >= fmean(apart)


def step_unasked(world: World, config: Config, folder: Path) -> None:
    """Steps as on a GPU, in which Python asks for no number; what it would be told if it did."""
    trainer = Trainer(config, replace(world, device=choose_device("cpu")), Path(config.data.dir))
    assert not trainer.waits
    with trainer.loader:
        weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        before = weights | trainer.optimizer.export_state()
        trainer.warm_up()
        # What warming up begins with: a step that is left out.
        loss = trainer.forward_backward(next(trainer.loader)) * math.nan
        trainer.update(agree(trainer.world, loss, trainer.gradients, Pending()))
        trainer.optimizer.zero_grad()
        after = trainer.model.state_dict() | trainer.optimizer.export_state()
        assert same_bits(before, after)
        # torch compiles nothing that is watched; but for that it is the code that is captured.
        with torch.compiler.set_stance("force_eager"), NoWaits() as watched:
            for _ in range(3):
                trainer.step()
        told = [*trainer.outcomes(everything=True)]
    assert [outcome.finite for outcome in told] == [True] * 3
    assert not same_bits(weights, trainer.model.state_dict())
    (folder / "operations").write_text(str(watched.operations))


@pytest.mark.gpu
def test_nor_does_it_where_a_gpu_is(tiny: Make) -> None:
    """CUDA itself refuses waits here, those of copies from memory that is not pinned among them."""
    if not torch.cuda.is_available():
        pytest.skip("NOT TESTED: there is no GPU that torch can use; where there is: make gpu")
    config = tiny(*TOY, "machine.device=cuda", "optimizer.clip=1.0", recipe="record-18")
    world = World.alone(choose_device("cuda"))
    trainer = Trainer(config, world, Path(config.data.dir))
    with trainer.loader:
        trainer.warm_up()
        trainer.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                trainer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [outcome.finite for outcome in trainer.outcomes(everything=True)] == [True] * 4


def test_blocks_that_are_computed_again_are_captured_as_well(tiny: Make, tmp_path: Path) -> None:
    """With FlexAttention, the compiler and two ranks; the weights are those of what was kept."""
    for name in ("false", "true"):
        words = ("machine.device=rehearsal", "machine.microbatch=1", f"machine.recompute={name}")
        config = tiny(*TOY, *words, "batch.tokens=2048", "train.steps=8", recipe="record-18")
        on_ranks(2, train_there, tmp_path, config, tmp_path / name, None)
        (end,) = RunFolder(tmp_path / name).read_metrics("end")
        assert (end["graphs"], end["graph_breaks"], end["recompilations"]) == (2, 0, 0)
    assert near(losses(tmp_path / "true"), losses(tmp_path / "false"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_waits_for_nothing(recipe: str, tiny: Make, tmp_path: Path) -> None:
    config = tiny(*TOY, "machine.device=rehearsal", "optimizer.clip=1.0", recipe=recipe)
    on_ranks(1, step_unasked, tmp_path, config, tmp_path)
    assert int((tmp_path / "operations").read_text()) > 1000


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_whole_schedule_is_that_of_fp32(
    recipe: str, device: str, tiny: Make, tmp_path: Path
) -> None:
    here = tiny(*TOY, "machine.device=cpu", recipe=recipe)
    there = tiny(*TOY, f"machine.device={device}", "machine.guards=all", recipe=recipe)
    on_ranks(1, jobs.train, tmp_path, here, tmp_path / "here")
    on_ranks(1, train_there, tmp_path, there, tmp_path / "there", None)
    for kind in ("train", "val"):
        expected = losses(tmp_path / "here", kind)
        found = losses(tmp_path / "there", kind)
        assert near(found, expected)
        assert found != expected, "bf16 must show"
    assert losses(tmp_path / "here")[-1] < losses(tmp_path / "here")[0] - 0.5
    (end,) = RunFolder(tmp_path / "there").read_metrics("end")
    assert (end["graphs"], end["graph_breaks"], end["recompilations"]) == (2, 0, 0)
    if recipe in ("record-13", "record-18"):
        windows = {settings_at(there, step).window for step in range(there.steps)}
        assert len(windows) > 1, "the schedule has something to grow"


def test_two_ranks_stopped_and_resumed(tiny: Make, tmp_path: Path) -> None:
    """On gloo, whose sums have one order; by as many ranks the same bits, by one nearly."""
    config = tiny(*WIDER, "machine.device=rehearsal", "batch.tokens=2048", "machine.microbatch=1",
                  recipe="record-18")  # fmt: skip
    on_ranks(2, train_and_count_buckets, tmp_path, config, tmp_path / "whole")
    on_ranks(2, train_there, tmp_path, config, tmp_path / "cut", {"stop_after": 16})
    (tmp_path / "alone").mkdir()
    for path in (tmp_path / "cut").rglob("*"):
        copy = tmp_path / "alone" / path.relative_to(tmp_path / "cut")
        copy.mkdir() if path.is_dir() else copy.write_bytes(path.read_bytes())
    on_ranks(2, train_there, tmp_path, config, tmp_path / "cut", {"resume": True})
    on_ranks(1, train_there, tmp_path, config, tmp_path / "alone", {"resume": True})
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert newest(tmp_path / "cut/checkpoints").step == 24
    assert same_bits(tensors(tmp_path / "cut"), tensors(tmp_path / "whole"))
    assert near(losses(tmp_path / "alone"), losses(tmp_path / "whole"))
    for name in ("whole", "cut", "alone"):
        end = RunFolder(tmp_path / name).read_metrics("end")[-1]
        assert (end["graphs"], end["graph_breaks"], end["recompilations"]) == (2, 0, 0)


def test_what_would_go_wrong_on_a_gpu_is_found(tiny: Make, tmp_path: Path) -> None:
    config = tiny(*TOY, "machine.device=rehearsal", recipe="baseline")
    on_ranks(1, train_with_a_constant, tmp_path, config, tmp_path / "constant")
    (end,) = RunFolder(tmp_path / "constant").read_metrics("end")
    assert end["recompilations"] >= 2
    on_ranks(1, train_with_a_look_at_a_number, tmp_path, config, tmp_path / "look")
    assert "data-dependent" in (tmp_path / "said").read_text().lower()


def test_few_guards_change_nothing(tiny: Make, tmp_path: Path) -> None:
    """That they are left out shows where a number has changed against the rules: nobody notices."""
    plain = tiny(*TOY, "machine.device=rehearsal", "machine.guards=all", recipe="record-18")
    few = tiny(*TOY, "machine.device=rehearsal", "machine.guards=few", recipe="record-18")
    for name, config in (("all", plain), ("few", few)):
        on_ranks(1, train_there, tmp_path, config, tmp_path / name, None)
        on_ranks(1, train_with_a_constant, tmp_path, config, tmp_path / f"{name}-changing")
    assert same_bits(tensors(tmp_path / "all"), tensors(tmp_path / "few"))
    anew = {
        name: RunFolder(tmp_path / f"{name}-changing").read_metrics("end")[-1]["recompilations"]
        for name in ("all", "few")
    }
    assert anew["all"] >= 2
    assert anew["few"] == 0, "nobody looked"


WAITS = """
import torch
from torch import nn
from speedrun.model.block import MLP

class Waits(MLP):
    def forward(self, x, norm):
        y = super().forward(x, norm)
        return y if float(y.detach().abs().max()) < 1e9 else x
"""


def run_command(words: list[str], output: Path) -> tuple[int | None, str]:
    child = speedrun(words, output)
    child.join(PATIENCE)
    return child.exitcode, output.read_text()


def test_the_command(tiny_dataset: Path, tmp_path: Path) -> None:
    small = ["model.layers=2", "model.width=32", "model.heads=2", f"data.dir={tiny_dataset}"]
    only_there = [
        "machine.full_blocks=false",
        "machine.attention=flex",
        "optimizer.muon.dtype=bf16",
    ]
    words = ["train", "modern", *small, *only_there, "--rehearse", "cuda", "--steps", "8"]
    code, said = run_command(words, tmp_path / "good")
    assert code == 0, said
    assert "modern is ready for 2 ranks on CUDA, but for a GPU's own kernels" in said
    assert "NOT SO" not in said

    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "mine.toml").write_text(
        'why = "A look at a number in every layer."\nextends = "modern"\n'
        '[custom.mlp]\nuse = "waits.py:Waits"\n'
    )
    words = ["train", str(tmp_path / "mine.toml"), *small, "--rehearse", "cuda", "--steps", "8"]
    code, said = run_command(words, tmp_path / "bad")
    assert code == 1, said
    assert "as on GPUs, 2 ranks: " in said
    assert "torch.compile cannot take waits.py, line 9 (return y if float(" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--rehearse", "tpu"], "cuda is what can be rehearsed"),
        (["--rehearse", "cuda", "--run", "here"], "leave --run out"),
        (["--rehearse", "cuda", "--stop-after", "3"], "leave --stop-after out"),
        (["--rehearse", "cuda", "--checkpoint-every", "3"], "leave --checkpoint-every out"),
        (["--rehearse", "cuda", "--log", "tensorboard"], "leave --log out"),
        (["machine.device=cpu", "--rehearse", "cuda"], "chooses machine.device itself"),
    ],
)
def test_misuse_is_told(words: list[str], reason: str, tmp_path: Path) -> None:
    code, said = run_command(["train", "modern", *words], tmp_path / "said")
    assert code == 2
    assert reason in said
    assert "Traceback" not in said
