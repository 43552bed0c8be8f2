"""State where few look: brought back to the bit, or refused by its name."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load, save

from speedrun.optim import OptimError
from tests.optim import nasty
from tests.optim.foreign import Toy
from tests.optim.test_combined import Net, same, train
from tests.optim.test_foreign import combined, own


@pytest.mark.parametrize("toy", nasty.REFUSED, ids=lambda toy: toy.__name__)
def test_it_is_refused_for_what_it_does(toy: type[Toy]) -> None:
    with pytest.raises(OptimError, match=nasty.REFUSED[toy]) as caught:
        combined(Net(), hidden=own(toy))
    assert len(str(caught.value)) < 400
    assert torch.backends.mkldnn.enabled


@pytest.mark.parametrize("toy", nasty.LATE, ids=lambda toy: toy.__name__)
def test_what_was_made_late_is_refused_when_it_is_to_be_saved(toy: type[Toy]) -> None:
    net = Net()
    optimizer = combined(net, hidden=own(toy))
    train(net, optimizer, range(20))
    optimizer.export_state()
    train(net, optimizer, range(20, 35))
    with pytest.raises(OptimError, match=nasty.LATE[toy]):
        optimizer.export_state()
    nasty.HELD.clear()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_rate_of_zero_is_no_fault(make: type[torch.optim.Optimizer]) -> None:
    combined(Net(), hidden=own(make, lr=0.0))


@pytest.mark.parametrize("toy", nasty.GOOD, ids=lambda toy: toy.__name__)
def test_it_comes_back_to_the_bit(toy: type[Toy]) -> None:
    straight, parted = Net(), Net()
    through, first = combined(straight, hidden=own(toy)), combined(parted, hidden=own(toy))
    train(straight, through, range(6))
    train(parted, first, range(3))
    fresh = copy.deepcopy(parted)
    second = combined(fresh, hidden=own(toy))
    second.import_state(load(save(first.export_state())))
    train(fresh, second, range(3, 6))
    same(straight, fresh)
