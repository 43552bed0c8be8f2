"""Optimizers of somebody else's that cannot work: told in a sentence, before a run or in it."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from speedrun.optim import CombinedOptimizer, OptimError
from speedrun.optim.foreign import probe as trying
from speedrun.streams import Streams
from tests.optim import foreign as toys
from tests.optim.test_combined import Net, tokens_at, train
from tests.optim.test_foreign import OURS, combined, own, trusted

__all__ = ["trusted"]  # a fixture

REFUSED = {
    "NeedsClosure": r"NeedsClosure \(for hidden\) needs a closure",
    "SecondBackward": "needs a second backward pass",
    "Drawing": "draws random numbers of torch in a step.*set random = true",
    "TouchingOthers": "changed a parameter of shape .* that was not given to it",
    "SharedCount": "two of it, given the same weights and gradients, came apart in step 1",
    "Iterating": "its steps is a count, of which nobody can tell its place",
    "Elsewhere": "its counts is a SimpleNamespace that changes from step to step",
    "InItsClass": r"changes InItsClass\.calls from step to step, which belongs to its class",
    "OwnRate": r"do not depend on the `lr`.*set scheduled = false",
    "Decaying": "sets the learning rate itself",
    "Setting": "calls torch.set_default_dtype in a step",
    "Failing": r"failed in step\(\): KeyError: \('momentum_buffer', .* \(line \d+ of foreign",
    "Sparse": r"cannot be saved exactly: its .*weight:mean is a sparse_coo tensor",
    "Hooking": "hooks into the backward pass",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_before_the_first_step(name: str) -> None:
    net = Net()
    streams = torch.get_rng_state(), random.getstate()
    with pytest.raises(OptimError, match=REFUSED[name]):
        combined(net, hidden=own(getattr(toys, name)))
    assert torch.equal(streams[0], torch.get_rng_state())
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("lr", [-0.001, float("nan"), float("inf"), torch.tensor(-0.5)])
def test_a_rate_that_is_none_is_refused(lr: Any) -> None:
    with pytest.raises(OptimError, match=r"has the learning rate .*: give it one that is finite"):
        combined(Net(), hidden=own(toys.SignMomentum, lr=lr))


@pytest.mark.parametrize("source", ["numpy", "python"])
def test_no_random_numbers_of_the_run_are_drawn(source: str) -> None:
    net = Net()
    with pytest.raises(OptimError, match=r"numbers of (numpy\.random|random) in a step"):
        combined(net, hidden=own(toys.Drawing, source=source))
    before = Streams.now()
    train(net, combined(net, hidden=own(toys.Drawing, source=source, random=True)), range(2))
    assert not Streams.now().moved(before)


@pytest.mark.parametrize(
    ("role", "message"),
    [
        (own(toys.SignMomentum, momentum=0.9), "no argument momentum and reads no such option.*it takes lr, beta"),  # noqa: E501
        (own(toys.Swallowing, betta=0.9), "no argument betta and reads no such option"),
        (own(toys.SignMomentum, lr=0.1, beta="x"), r"cannot be made|failed in step\(\)"),
        (own(torch.optim.Muon, lr=0.1), r"cannot be made: ValueError: Muon only supports 2D"),
        (own(toys.OptionsInGroups, factor=0.5), "have no `lr` that is a number"),
        (own(toys.Asserting), r'cannot be made: AssertionError: assert "kind" in group \(line'),
        (own(nn.Linear), "cannot be made"),
        (own(list), "gives a list, which is no torch.optim.Optimizer"),
        ({"kind": "own", "make": None}, "the 'make' of role 'scalar' is None"),
        ({"kind": "own"}, "the options of role 'scalar' lack 'make'"),
        ({"kind": "own", "make": toys.Toy, "lr": 1.0}, "have 'lr'; an optimizer of another"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_refused_with_what_it_takes(
    role: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptimError, match=message):
        combined(Net(), scalar=role)


def test_options_of_groups_lists_and_names_are_given_as_the_class_wants_them() -> None:
    net = Net()
    optimizer = combined(
        net,
        hidden=own(toys.OptionsInGroups, scheduled=False, factor=0.5),
        scalar=own(toys.ListOnly, lr=0.2),
    )
    assert optimizer.foreign[1].optimizer.param_groups[0]["factor"] == 0.5
    before = copy.deepcopy(net)
    train(net, optimizer, range(1))
    twin = copy.deepcopy(before)
    twin.loss(tokens_at(0)).backward()  # type: ignore[no-untyped-call]
    assert twin.up.weight.grad is not None
    assert torch.equal(net.up.weight, before.up.weight - 0.5 * twin.up.weight.grad)
    assert [row.lr for row in optimizer.plan() if row.role == "hidden"] == [None, None]
    with pytest.raises(OptimError, match="no argument other and reads no such option"):
        combined(Net(), hidden=own(toys.OptionsInGroups, scheduled=False, factor=0.5, other=1.0))


@pytest.mark.parametrize("name", ["TouchingOthers", "Drawing", "Setting", "Sparse"])
def test_a_run_is_watched_too(name: str, trusted: None) -> None:
    """What the trial could not see shows when it happens."""
    net, bystander = Net(), Parameter(torch.ones(2, 2))
    entries = [*net.by_role(), ("other", bystander, "head")]
    optimizer = CombinedOptimizer(entries, {**OURS, "hidden": own(getattr(toys, name))})
    toys.TouchingOthers.everyone.append(bystander)
    net.loss(tokens_at(0)).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(OptimError, match=REFUSED[name]):
        optimizer.step()


def test_matrices_that_are_too_small_to_try_are_tried_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Large(toys.Toy):
        def direction(self, weight: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
            assert weight.size(0) >= 40, "too small"
            return super().direction(weight, group)

    tried: list[tuple[int, ...]] = []
    honest = trying._Trial.run

    def watched(self: Any) -> None:
        tried.extend(tuple(like.shape) for likes in self.likes.values() for _, like in likes)
        honest(self)

    monkeypatch.setattr(trying._Trial, "run", watched)
    weights = [(f"w{i}", Parameter(torch.zeros(48, n)), "hidden") for i, n in enumerate((8, 8, 96))]
    CombinedOptimizer(weights, {"hidden": own(Large)})
    assert tried == [(24, 4), (48, 96), (48, 8), (48, 96)]
