"""Runs with optimizers of somebody else's: resumed, validated, rewound and on ranks like ours."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from speedrun.config.schema import Config
from speedrun.errors import RunError
from speedrun.optim import combined
from speedrun.optim.errors import OptimError
from speedrun.train.outcomes import NONFINITE_STEPS
from speedrun.train.request import Interval
from speedrun.train.run import RunFolder
from speedrun.train.trained import load_trained
from speedrun.train.world import World
from tests.optim import foreign as toys
from tests.train import jobs
from tests.train.children import on_ranks
from tests.train.heard import (
    Heard,
    Make,
    losses,
    newest,
    quiet_log,
    same_bits,
    step,
    tensors,
    train,
    values,
    writer_into,
)
from tests.train.test_trainer import spoil, state, trainer_of

FILE = Path(toys.__file__)


def words(**roles: str) -> list[str]:
    return [f"optimizer.{role}.use={FILE}:{name}" for role, name in roles.items()]


MODES = [*words(hidden="Averaging"), "optimizer.hidden.scheduled=false"]
ALL = [
    *MODES,
    *words(scalar="Trees", embedding="SignMomentum", head="Drawing"),
    "optimizer.head.random=true",
    "optimizer.head.args.lr=0.05",
    "optimizer.clip=0.5",
    "machine.microbatch=2",
]


def test_a_run_with_four_of_them_goes_on_exactly(tiny: Make, tmp_path: Path) -> None:
    config = tiny(*ALL)
    heard = Heard()
    train(config, tmp_path / "whole", heard)
    said = f"hidden by foreign.py:Averaging ({config.optimizer.hidden.code[:12]}): lr 0.05, not "
    assert any(line.startswith(said) for line in heard.lines)
    train(config, tmp_path / "cut", Heard(3))
    for stop in (5, -1):
        train(RunFolder(tmp_path / "cut").load_config(), tmp_path / "cut", Heard(stop), resume=True)
    for kind in ("train", "val"):
        assert losses(tmp_path / "cut", kind) == losses(tmp_path / "whole", kind)
    assert same_bits(tensors(tmp_path / "cut"), tensors(tmp_path / "whole"))
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]


def test_what_is_validated_and_saved_is_the_eval_mode_and_training_never_notices(
    tiny: Make, tmp_path: Path
) -> None:
    rare, often = (tiny(*MODES, f"validation.every={n}") for n in (8, 1))
    train(rare, tmp_path / "rare")
    train(often, tmp_path / "often", checkpoint_every=Interval(steps=2))
    assert losses(tmp_path / "rare") == losses(tmp_path / "often")
    assert same_bits(tensors(tmp_path / "rare"), tensors(tmp_path / "often"))
    assert values(tmp_path / "often", "val") == [*range(9)]
    # At step 0 there is nothing to average yet; then the weights in use are others.
    plain = tiny(*words(hidden="Averaging"), "validation.every=1")
    with trainer_of(plain) as trainer:
        assert losses(tmp_path / "often", "val")[0] == trainer.validate().loss
    found = newest(tmp_path / "often/checkpoints")
    name = next(name for name in found.model() if "mlp" in name)
    apart = found.model()[name] - found.optimizer()[f"[hidden]:weights/{name}"]
    assert apart.abs().max() > 0
    run = RunFolder(tmp_path / "often")
    trained = load_trained(run, 384, torch.device("cpu"))
    with trainer_of(often) as trainer:
        trainer.progress.step = found.step
        trainer.model.load_state_dict(trained.model.state_dict(), strict=False)
        assert trainer.validate().loss == losses(tmp_path / "often", "val")[-1]


def test_a_rewind_puts_everything_back(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(*ALL)
    with trainer_of(config) as trainer, closing(writer_into(tmp_path)) as writer:
        for _ in range(2):
            step(trainer)
        trainer.save(writer)
        before = state(trainer)
        step(trainer)
        assert not same_bits(before, state(trainer))
        spoil(trainer, monkeypatch, {3, 4, 5})
        outcomes = [step(trainer) for _ in range(NONFINITE_STEPS)]
        assert outcomes[-1].must_rewind
        trainer.rewind(writer, quiet_log(config))
        after = state(trainer)
        assert same_bits(before, after)
        assert step(trainer).finite


def test_ranks_do_the_same_or_the_run_ends(tiny: Make, tmp_path: Path) -> None:
    same = tiny(*ALL, "machine.microbatch=1", "train.steps=4", "validation.every=2")
    apart = tiny(*words(hidden="ByRank"), "validation.every=2")
    fails = tiny(*words(hidden="FailsOnOne"))
    on_ranks(2, train_all, tmp_path, same, apart, fails, tmp_path)
    train(same, tmp_path / "alone")
    assert losses(tmp_path / "same") == pytest.approx(losses(tmp_path / "alone"), abs=1e-3)
    report = (tmp_path / "report").read_text()
    assert (
        "rank 1 has other weights or another state than rank 0: foreign.py:ByRank (for hid"
        in report
    )

    failed = (tmp_path / "failed").read_text()
    assert "step 2: foreign.py:FailsOnOne (for hidden) failed in step(): ValueError" in failed


def train_all(world: World, same: Config, apart: Config, fails: Config, folder: Path) -> None:
    jobs.train(world, same, folder / "same", {"warm_up": False})
    combined.probe = lambda *_: None  # type: ignore[attr-defined]
    with pytest.raises(RunError if world.rank == 1 else SystemExit) as caught:
        jobs.train(world, fails, folder / "fails", {"warm_up": False})
    if world.rank == 1:
        (folder / "failed").write_text(str(caught.value))
    world.barrier()
    with pytest.raises(RunError if world.first else SystemExit) as caught:
        jobs.train(world, apart, folder / "apart", {"warm_up": False})
    if world.first:
        (folder / "report").write_text(str(caught.value))


def test_one_that_is_refused_ends_a_run_before_it_begins(tiny: Make, tmp_path: Path) -> None:
    with pytest.raises(OptimError, match=r"foreign\.py:SharedCount \(for hidden\) cannot be used"):
        train(tiny(*words(hidden="SharedCount")), tmp_path / "run")
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_one_that_misbehaves_later_ends_the_run(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speedrun.optim.combined.probe", lambda *_: None)
    with pytest.raises(RunError, match=r"step 0: foreign\.py:Drawing .* draws random numbers"):
        train(tiny(*words(hidden="Drawing")), tmp_path / "run")
