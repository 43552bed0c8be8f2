"""The loss of training and of validation, and the softcap on logits."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from speedrun.model.gpt import GPT
from speedrun.model.loss import Loss

from .test_gpt import T, V, causal, ids_of, lively, small


@pytest.mark.parametrize("cap", [0.0, 5.0, 15.0, 30.0])
def test_loss_at_step_0_is_ln_v_with_a_zero_head(cap: float) -> None:
    torch.manual_seed(0)
    model = GPT(small(softcap=cap), V, T)
    loss = model(ids_of(2), causal(2), ids_of(2, seed=1))
    assert loss.item() == pytest.approx(math.log(384), abs=1e-5)


def test_softcap_bounds_and_slope() -> None:
    model = lively(softcap=15.0)
    free = lively(softcap=0.0)
    with torch.no_grad():
        capped, raw = model(ids_of(), causal()), free(ids_of(), causal())
    torch.testing.assert_close(capped, 15 * torch.tanh(raw / 15))
    x = torch.zeros(1, 1, 64, requires_grad=True)
    model.logits(x * 100)[0, 0, 3].backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0, 0], 100 * model.head.weight[3])  # type: ignore[union-attr]
    with torch.no_grad():
        assert model.logits(1000 * torch.randn(1, 8, 64)).abs().max() <= 15.0


def test_the_mode_of_the_model_chooses_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(loss: Loss, x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        return 2 * loss.validation_loss(x, head, targets)

    monkeypatch.setattr(Loss, "training_loss", doubled)
    model = lively()
    with torch.no_grad():
        validation = model.eval()(ids_of(), causal(), ids_of(seed=1))
        training = model.train()(ids_of(), causal(), ids_of(seed=1))
    assert torch.equal(training, 2 * validation)


@pytest.mark.parametrize("training", [True, False])
def test_both_losses_are_the_mean_over_all_tokens(training: bool) -> None:
    model = lively(softcap=15.0).train(training)
    ids, targets = ids_of(2), ids_of(2, seed=1)
    with torch.no_grad():
        loss, logits = model(ids, causal(2), targets), model(ids, causal(2))
    expected = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_loss_adds_nothing_to_checkpoints() -> None:
    assert not [name for name in GPT(small(), V, T).state_dict() if name.startswith("loss")]


def test_the_loss_of_each_token_and_none_where_the_target_is_negative() -> None:
    model = lively().eval()
    targets = ids_of(2, seed=1).long()
    with torch.no_grad():
        logits = model(ids_of(2), causal(2))
        each = model(ids_of(2), causal(2), targets, each=True)
        some = targets.masked_fill(torch.rand(targets.shape) < 0.5, -1)
        counted = model(ids_of(2), causal(2), some, each=True)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(each, expected.view_as(targets))
    torch.testing.assert_close(counted, torch.where(some >= 0, each, 0.0))
