"""NorMuon and cautious decay where their formulas leave something open, and both switched off.

That both equal their formulas is tested in test_muon.py, and over several ranks in ranks.py.
"""

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from speedrun.optim import Muon, OptimError, muon_update, orthogonalize
from speedrun.optim.layout import update_scale
from tests.optim.test_muon import MIXED, make_params, set_grads, train

BOTH: dict[str, Any] = {"neuron_beta": 0.9, "weight_decay": 0.1, "cautious": True}


@pytest.mark.parametrize("shape", [(16, 16), (32, 8), (8, 32)])
def test_switched_off_nothing_is_computed_differently(shape: tuple[int, int]) -> None:
    """To the bit: momentum, orthogonalisation, decay and step, with nothing in between."""
    tall = shape[0] > shape[1]  # such a matrix lies on its side in memory, which decides on bits
    [param] = make_params([shape])
    weight = param.detach().clone()
    momentum = torch.zeros(shape[::-1]).mT if tall else torch.zeros(shape)
    ahead = torch.empty_like(momentum)
    optimizer = Muon([param], lr=0.05, weight_decay=0.1)
    for step in range(3):
        train(optimizer, [param], range(step, step + 1))
        assert param.grad is not None
        momentum.lerp_(ahead.copy_(param.grad), 1 - 0.95)
        update = orthogonalize(ahead.lerp_(momentum, 0.95), out=ahead)
        weight.mul_(1 - 0.05 * 0.1).add_(update, alpha=-0.05 * update_scale("spectral", *shape))
        assert torch.equal(param.detach(), weight)
    assert set(optimizer.whole_state()[param]) == {"momentum"}


@pytest.mark.parametrize("shape", [(3, 12, 5), (3, 5, 12), (3, 7, 7), (2, 6, 1), (2, 1, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neurons_move_alike_and_the_norm_stays(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """At the first step V is the very squares, times 1 - beta for all neurons."""
    _, rows, cols = shape
    grad = torch.randn(shape) * torch.linspace(0.01, 3.0, rows)[:, None]
    options = {**Muon.options().values(), "dtype": dtype, "neuron_beta": 0.95}
    neurons = torch.zeros(shape[0], *((rows, 1) if rows >= cols else (1, cols)))
    state = {"momentum": torch.zeros(shape), "neurons": neurons}
    update = muon_update(grad.clone(), state, options)
    plain = orthogonalize((1 - 0.95**2) * grad, dtype=dtype)  # the first of Nesterov
    assert update.dtype == dtype
    norms = update.norm(dim=2 if rows >= cols else 1)
    torch.testing.assert_close(norms, norms.mean(1, keepdim=True).expand_as(norms))
    torch.testing.assert_close(update.norm(dim=(1, 2)), plain.norm(dim=(1, 2)))


def test_neurons_that_never_had_a_gradient_stay_where_they_are() -> None:
    """Their V is 0, and so is all V of a matrix whose gradients are 0."""
    params = make_params([(8, 4), (8, 4), (4, 8)])
    before = [p.detach().clone() for p in params]
    optimizer = Muon(params, neuron_beta=0.9)
    dead = ([2, 5], [*range(8)], [1, 6])
    for step in range(3):
        set_grads(params, step)
        for param, neurons in zip(params, dead, strict=True):
            assert param.grad is not None
            (param.grad if len(param) == 8 else param.grad.T)[neurons] = 0.0
        optimizer.step()
    for param, start, neurons in zip(params, before, dead, strict=True):
        moved = (param.detach() - start).abs().sum(1 if len(param) == 8 else 0)
        assert moved.isfinite().all()
        assert (moved == 0).nonzero().flatten().tolist() == neurons


def test_only_weights_that_the_update_does_not_make_grow_decay() -> None:
    """With a huge decay and a tiny step the decay is all there is to see; an update of 0 counts."""
    for dtype in (torch.float32, torch.bfloat16):
        param = Parameter(torch.tensor([[1.0, -1.0], [2.0, -2.0]], dtype=dtype))
        param.grad = torch.eye(2, dtype=dtype)
        Muon([param], lr=1e-6, weight_decay=5e5, cautious=True).step()
        expected = torch.tensor([[0.5, -0.5], [1.0, -2.0]])
        torch.testing.assert_close(param.detach().float(), expected, atol=1e-5, rtol=0)


def test_splits_have_neurons_of_their_own() -> None:
    """A fused matrix is what its blocks would be as parameters, and the state is all theirs."""
    [fused] = make_params([(24, 8)])
    parts = [Parameter(part.clone()) for part in torch.split(fused.detach(), [16, 4, 4])]
    whole = Muon([("w", fused)], split_rows=(16, 4, 4), **BOTH)
    apart = Muon(parts, **BOTH)
    for step in range(3):
        set_grads([fused], step)
        assert fused.grad is not None
        for part, grad in zip(parts, torch.split(fused.grad, [16, 4, 4]), strict=True):
            part.grad = grad.clone()
        whole.step()
        apart.step()
    torch.testing.assert_close(fused.detach(), torch.cat([p.detach() for p in parts]))
    states = apart.whole_state()
    theirs = torch.cat([states[part]["neurons"].flatten() for part in parts])
    torch.testing.assert_close(whole.export_state()["w:neurons"], theirs)
    assert whole.state_bytes() == 4 * (24 * 8 + 16 + 8 + 8)


def test_a_parameter_without_gradient_is_left_alone() -> None:
    params = make_params([(8, 6)] * 3)
    optimizer = Muon([(f"w{i}", p) for i, p in enumerate(params)], **BOTH)
    train(optimizer, params, range(2))
    before, weights = optimizer.export_state(), [p.detach().clone() for p in params]
    set_grads(params, 2)
    params[1].grad = None
    optimizer.step()
    for key, tensor in optimizer.export_state().items():
        assert torch.equal(tensor, before[key]) == key.startswith("w1")
    assert [torch.equal(p, w) for p, w in zip(params, weights, strict=True)] == [False, True, False]


def test_a_resumed_run_goes_on_to_the_bit() -> None:
    params = make_params(MIXED)
    optimizer = Muon([(f"w{i}", p) for i, p in enumerate(params)], **BOTH)
    train(optimizer, params, range(3))
    others = [Parameter(p.detach().clone()) for p in params]
    resumed = Muon([(f"w{i}", p) for i, p in enumerate(others)], **BOTH)
    resumed.import_state(optimizer.export_state())
    train(optimizer, params, range(3, 6))
    train(resumed, others, range(3, 6))
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param, other)


def test_state_and_option_must_go_together() -> None:
    [param] = make_params([(8, 6)])
    plain, normed = Muon([param]), Muon([param], neuron_beta=0.9)
    with pytest.raises(OptimError, match="holds momentum, but its optimizer needs momentum, neur"):
        normed.load_state_dict(plain.state_dict())
    plain.param_groups[0]["neuron_beta"] = 0.9
    with pytest.raises(OptimError, match="neuron_beta was 0 when the optimizer was made"):
        train(plain, [param], range(1))


def test_no_buffer_is_made_in_a_step() -> None:
    params = make_params([(96, 96)] * 4 + [(64, 256), (256, 64)])
    optimizer = Muon(params, **BOTH)
    train(optimizer, params, range(1))
    set_grads(params, 1)
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer.step()
    allocated = [event.self_cpu_memory_usage for event in profile.events() or []]
    assert max(allocated) < 96 * 96 * 4 / 10
