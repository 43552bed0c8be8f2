"""Optimizers that nobody here wrote, from their own packages, which `make integration` installs.

Each trains the model of nano on the matrices and on other roles, is stopped and goes on to the very
bits of a run that was not, and stands in a race. What each is refused for, if it is, has its
sentence in docs/own-optimizer.md.
"""

from __future__ import annotations

import json
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.optim.errors import OptimError
from speedrun.science import children
from speedrun.science.race import race
from speedrun.train.run import RunFolder
from speedrun.train.trained import load_trained
from tests.conftest import TINY
from tests.train import jobs
from tests.train.children import QuickChild, on_ranks, speedrun, steps_logged
from tests.train.heard import ALONE, Heard, losses, same_bits, tensors, train
from tests.waiting import PATIENCE, wait_for
from tools.optimizers.tried import RESULTS, classes, tried, version_of

PACKAGES = ("pytorch_optimizer", "schedulefree", "muon", "opt_einsum")
pytestmark = [
    pytest.mark.timeout(900),
    *(
        pytest.mark.skipif(
            find_spec(package) is None,
            reason=f"NOT TESTED: {package}, which `make integration` installs",
        )
        for package in PACKAGES
    ),
]

FREE = {"scheduled": False}
DRAWS = {"random": True}
# What the table of the hidden matrices says; most are given the other matrices as well.
HIDDEN: dict[str, dict[str, Any]] = {
    "torch.optim:AdamW": {"args": {"lr": 0.003, "weight_decay": 0.1, "betas": [0.9, 0.95]}},
    "torch.optim:Adafactor": {"args": {"lr": 0.01}},
    "torch.optim:Muon": {"args": {"lr": 0.02, "weight_decay": 0.0}},
    "torch.optim:RMSprop": {"args": {"lr": 0.001, "momentum": 0.9}},
    "torch.optim:SGD": {"args": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
    "torch.optim:NAdam": {"args": {"lr": 0.002}},
    "torch.optim:Adagrad": {"args": {"lr": 0.01}},
    "torch.optim:RAdam": {"args": {"lr": 0.003}},
    "pytorch_optimizer:SOAP": {"args": {"lr": 0.003, "precondition_frequency": 2}},
    "pytorch_optimizer:Shampoo": {"args": {"lr": 0.003, "preconditioning_compute_steps": 2}},
    "pytorch_optimizer:Lion": {"args": {"lr": 0.0005}},
    "pytorch_optimizer:ADOPT": {"args": {"lr": 0.003}},
    "pytorch_optimizer:Kron": {"args": {"lr": 0.001}, **DRAWS},
    "pytorch_optimizer:Prodigy": {"args": {"lr": 1.0}},
    "pytorch_optimizer:Muon": {"args": {"lr": 0.02, "use_muon": True}},
    "pytorch_optimizer:ScheduleFreeAdamW": {"args": {"lr": 0.003}, **FREE},
    "muon:SingleDeviceMuon": {"args": {"lr": 0.02}},
    "schedulefree:AdamWScheduleFree": {"args": {"lr": 0.003, "warmup_steps": 2}, **FREE},
    "schedulefree:SGDScheduleFree": {"args": {"lr": 1.0}, **FREE},
    "schedulefree:RAdamScheduleFree": {"args": {"lr": 0.003}, **FREE},
}
# Which also go on all other roles: vectors, tables and the head.
EVERYWHERE = ("torch.optim:AdamW", "pytorch_optimizer:SOAP", "schedulefree:AdamWScheduleFree")
REFUSED = {
    "torch.optim:LBFGS": "needs a closure",
    "torch.optim:SparseAdam": "does not support dense gradients",
    "pytorch_optimizer:SophiaH": "needs a second backward pass",
    "pytorch_optimizer:AdaHessian": "needs a second backward pass",
    "pytorch_optimizer:AliG": "needs a closure",
    "pytorch_optimizer:SAM": "missing 1 required positional argument: 'base_optimizer'",
    "pytorch_optimizer:Kron": "draws random numbers of .* set random = true",
    "schedulefree:AdamWScheduleFreeClosure": "needs a closure",
    "muon:Muon": "Default process group has not been initialized",
}
ROLES = ("embedding", "head", "scalar")


def recipe(use: str, folder: Path) -> Path:
    """A recipe with this optimizer."""
    tables = {"hidden": {"use": use, **HIDDEN.get(use, {})}}
    if use in EVERYWHERE:
        tables |= dict.fromkeys(ROLES, tables["hidden"])
    path = folder / f"{use.replace(':', '-').replace('.', '-').replace('_', '-').lower()}.toml"
    path.write_text(tomli_w.dumps({"extends": "modern", "optimizer": tables}))
    return path


def words(dataset: Path, *more: str) -> list[str]:
    """The model of nano, at a batch that takes a moment."""
    small = ("batch.length=64", "batch.tokens=512", "validation.tokens=512", "validation.every=2")
    return [*small, "train.steps=6", "train.target=0.0", "machine.threads=1",
            f"data.dir={dataset}", *more]  # fmt: skip


@pytest.fixture
def nano(tiny_dataset: Path, tmp_path: Path) -> Any:
    def make(use: str, *more: str) -> Config:
        return resolve(str(recipe(use, tmp_path)), "nano", words(tiny_dataset, *more)).config

    return make


@pytest.mark.parametrize("use", HIDDEN)
def test_it_trains_nano_stops_and_goes_on_to_the_same_bits(
    use: str, nano: Any, tmp_path: Path
) -> None:
    config = nano(use)
    assert (config.model.width, config.model.layers) == (192, 4)
    train(config, tmp_path / "whole")
    train(config, tmp_path / "cut", Heard(3))
    train(RunFolder(tmp_path / "cut").load_config(), tmp_path / "cut", resume=True)
    for kind in ("train", "val"):
        assert losses(tmp_path / "cut", kind) == losses(tmp_path / "whole", kind)
    assert same_bits(tensors(tmp_path / "cut"), tensors(tmp_path / "whole"))
    assert losses(tmp_path / "whole", "val")[-1] < losses(tmp_path / "whole", "val")[0] - 0.1


@pytest.mark.parametrize("use", ["pytorch_optimizer:Kron", "schedulefree:AdamWScheduleFree"])
def test_killed_it_goes_on_to_the_same_bits(use: str, tiny_dataset: Path, tmp_path: Path) -> None:
    output, steps = tmp_path / "output", "train.steps=12"
    often = ("--checkpoint-every", "2", "--sample-tokens", "0")
    begin = ["train", str(recipe(use, tmp_path)), "--track", "nano", *often]
    whole = speedrun([*begin, "--run", tmp_path / "whole", *words(tiny_dataset, steps)], output)
    # It cannot come to its end before it is killed: its checkpoint of step 8 stays unfinished.
    cut = speedrun([*begin, "--run", tmp_path / "cut", *words(tiny_dataset, steps)], output, 8)
    wait_for(lambda: steps_logged(tmp_path / "cut") >= 5, "step 5")
    cut.kill()
    cut.join()
    assert cut.exitcode == -signal.SIGKILL
    again = speedrun(["train", "--resume", "--run", tmp_path / "cut", *often], output)
    for child in (whole, again):
        child.join(PATIENCE)
        assert child.exitcode == 0, output.read_text()[-3000:]
    for kind in ("train", "val"):
        assert losses(tmp_path / "cut", kind) == losses(tmp_path / "whole", kind)
    assert same_bits(tensors(tmp_path / "cut"), tensors(tmp_path / "whole"))


def test_two_ranks_stay_equal_and_go_on_to_the_same_bits(nano: Any, tmp_path: Path) -> None:
    use = "schedulefree:AdamWScheduleFree"
    longer, config = (nano(use, "schedule.cooldown=0", f"train.steps={n}") for n in (6, 4))
    on_ranks(2, jobs.train, tmp_path, longer, tmp_path / "whole")
    on_ranks(2, jobs.train, tmp_path, config, tmp_path / "cut")
    on_ranks(2, jobs.train, tmp_path, longer, tmp_path / "cut", {"resume": True})
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert same_bits(tensors(tmp_path / "cut"), tensors(tmp_path / "whole"))


def test_the_weights_of_a_schedule_free_run_are_those_that_were_validated(
    nano: Any, tmp_path: Path
) -> None:
    config = nano("schedulefree:AdamWScheduleFree")
    train(config, tmp_path / "run")
    trained = load_trained(RunFolder(tmp_path / "run"), 384, ALONE.device)
    saved = tensors(tmp_path / "run")
    apart = [
        float((saved[mine] - weight).abs().max())
        for name, weight in trained.model.state_dict().items()
        for mine in saved
        if mine.endswith(f":weights/{name}") and weight.ndim == 2
    ]
    assert len(apart) > 8
    assert min(apart) > 0


@pytest.mark.parametrize("use", REFUSED)
def test_what_cannot_work_is_refused_with_the_reason(
    use: str, tiny_dataset: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare.toml"
    bare.write_text(f'extends = "modern"\n[optimizer.hidden]\nuse = "{use}"\n')
    config = resolve(str(bare), "nano", words(tiny_dataset)).config
    with pytest.raises(OptimError, match=REFUSED[use]):
        train(config, tmp_path / "run")


@pytest.mark.parametrize("module", ["torch.optim", "schedulefree", "muon"])
def test_the_table_of_what_was_tried_holds(module: str) -> None:
    """Of those whose versions are pinned; pytorch_optimizer has 139 and takes half a minute."""
    told = json.loads(RESULTS.read_text())[module]
    assert told["version"] == version_of(module)
    assert [tried(f"{module}:{name}", make) for name, make in classes(module)] == told["classes"]


def test_all_of_them_stand_in_one_race(
    tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "Child", QuickChild)
    recipes = [str(recipe(use, tmp_path)) for use in HIDDEN]
    result = race(
        recipes=["modern", *recipes], track="nano", seeds=1, say=print, out=tmp_path / "race",
        overrides=[*TINY, f"data.dir={tiny_dataset}", "train.steps=4", "validation.every=4"],
    )  # fmt: skip
    assert len(result.entries) == 1 + len(HIDDEN)
    assert all(entry.val_loss is not None for entry in result.entries)
