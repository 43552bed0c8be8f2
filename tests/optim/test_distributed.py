"""Muon on 2, 3 and 4 gloo ranks: one spawned job of four processes, with subgroups for 2 and 3.

The ranks (ranks.py) check what only they can see and write their weights; these tests compare them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from speedrun.optim import (
    Muon,
)
from tests.optim.ranks import RANKS, ddp_steps, flat, make_muon, make_params
from tests.optim.tables import make_adam, make_tables, train_tables
from tests.optim.test_muon import train
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    program = (
        "import sys; from pathlib import Path; from tests.optim.ranks import run_rank;"
        "run_rank(int(sys.argv[1]), Path(sys.argv[2]))"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(folder)],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    errors = [process.communicate(timeout=PATIENCE)[1] for process in ranks]
    failed = [r for r in range(RANKS) if not (folder / f"done.{r}").exists()]
    assert not failed, "\n".join(f"rank {r}: {errors[r][-900:]}" for r in failed)
    return folder


@pytest.fixture(scope="module")
def alone() -> Tensor:
    params = make_params()
    train(make_muon(params), params, range(6))
    return flat(params)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_number_of_ranks_gives_the_weights_of_one(
    folder: Path, alone: Tensor, world: int
) -> None:
    together = torch.load(folder / f"at6.{world}", weights_only=True)
    torch.testing.assert_close(together, alone, atol=5e-6, rtol=0)


@pytest.mark.parametrize("world", [2, 3])
def test_saved_on_four_ranks_resumed_on_two_and_three(
    folder: Path, alone: Tensor, world: int
) -> None:
    resumed = torch.load(folder / f"resumed.{world}", weights_only=True)
    torch.testing.assert_close(resumed, alone, atol=5e-6, rtol=0)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_saved_on_any_number_of_ranks_resumed_on_one(
    folder: Path, alone: Tensor, world: int
) -> None:
    saved = torch.load(folder / f"at3.{world}", weights_only=True)
    params = [Parameter(w) for w in saved["middle"]]
    muon = make_muon(params)
    muon.load_state_dict(saved["state"])
    train(muon, params, range(3, 6))
    torch.testing.assert_close(flat(params), alone, atol=5e-6, rtol=0)


def test_the_saved_state_is_the_same_for_any_number_of_ranks(folder: Path) -> None:
    params = make_params()
    muon = make_muon(params)
    train(muon, params, range(3))
    expected = muon.state_dict()
    for world in (2, 3, 4):
        state = torch.load(folder / f"at3.{world}", weights_only=True)["state"]
        assert state["param_groups"] == expected["param_groups"]
        assert state["state"].keys() == expected["state"].keys()
        for i, slots in expected["state"].items():
            assert torch.equal(state["state"][i]["momentum"], slots["momentum"])
            assert state["state"][i].keys() == slots.keys()
            if "neurons" in slots:
                torch.testing.assert_close(state["state"][i]["neurons"], slots["neurons"])


@pytest.mark.parametrize("world", [2, 3, 4])
def test_tables_that_were_shared_out_are_saved_as_those_of_one(folder: Path, world: int) -> None:
    """That they come to what one rank comes to is checked by the ranks."""
    tables = make_tables()
    adam = make_adam(tables)
    train_tables(adam, tables, range(6))
    expected = adam.export_state()
    saved = torch.load(folder / f"tables.{world}", weights_only=True)
    again = make_adam(make_tables())
    again.load_state_dict(saved)
    for key, tensor in again.export_state().items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-6, atol=1e-9)


def test_the_wire_may_carry_another_type_than_the_momenta(folder: Path) -> None:
    params = make_params()
    train(Muon(params, dtype=torch.float64), params, range(3))
    together = torch.load(folder / "double", weights_only=True)
    torch.testing.assert_close(together, flat(params), atol=5e-6, rtol=0)


def test_gathers_hide_behind_compute(folder: Path) -> None:
    """Each is under way while the next bucket is computed: nine intervals for eight gathers."""
    for rank in range(RANKS):
        events = (folder / f"events.{rank}").read_text().split()
        assert events == ["compute", "send", *["compute", "wait", "send"] * 7, "wait"]


def test_they_can_be_waited_for(folder: Path) -> None:
    """The same weights, to the bit, which the ranks have checked."""
    for rank in range(RANKS):
        events = (folder / f"waiting.{rank}").read_text().split()
        assert events == ["compute", "send", "wait"] * 8


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_the_update_does_not_depend_on_how_a_batch_is_cut(folder: Path, pieces: int) -> None:
    whole, optimizer = ddp_steps(0, 1, None, 1)
    cut, _ = ddp_steps(0, 1, None, pieces)
    weights, state = torch.load(folder / f"ddp.{pieces}", weights_only=True)
    expected = flat(list(whole.parameters()))
    torch.testing.assert_close(flat(list(cut.parameters())), expected, atol=5e-6, rtol=0)
    torch.testing.assert_close(weights, expected, atol=5e-6, rtol=0)
    for key, tensor in optimizer.export_state().items():
        torch.testing.assert_close(state[key], tensor, atol=1e-6, rtol=1e-5)
