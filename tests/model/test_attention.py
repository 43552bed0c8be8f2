"""`attend` compiled and on every backend, and keys offset by a token."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as flex_module

from speedrun.model.attention import attend, offset_new_keys
from speedrun.model.backend import Backend
from speedrun.model.cache import LayerCache
from speedrun.model.fused import offset_keys
from speedrun.model.mask import WindowUnit
from speedrun.model.plan import LayerPlan, plan_layer
from speedrun.model.rotary import frequencies
from tests.model.documents import documents_of

from .reference import assert_close, by_hand, inputs, no_inductor, with_gradients
from .test_mask import UNITS, pairs, scalar


@pytest.mark.parametrize("inside", [True, False], ids=["plan_inside", "plan_outside"])
@pytest.mark.parametrize("backend", ["blocks", "flex", "dense"])
def test_a_whole_window_schedule_compiles_once(backend: Backend, inside: bool) -> None:
    """One graph without breaks, and no second one while window and documents change."""
    T = 512
    trains = backend != "flex"  # FlexAttention has no backward on CPU

    def layer(q: Tensor, k: Tensor, v: Tensor, plan: LayerPlan) -> Tensor:
        return attend(q * 2, k, v, plan, 0.2)

    def model(q: Tensor, k: Tensor, v: Tensor, documents_BT: Tensor, window: Tensor) -> Tensor:
        plan = plan_layer(backend, documents_BT, window)
        return layer(layer(q, k, v, plan), k, v, plan)

    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled_model = torch.compile(model, backend=graphs, fullgraph=True)
    compiled_layer = torch.compile(layer, backend=graphs, fullgraph=True)
    q, k, v, dout = (x.detach().requires_grad_(trains) for x in inputs(1, 2, 1, T, 16))
    window = scalar(1)
    for w in range(1, 7):
        window.fill_(w)
        documents_BT = documents_of((torch.arange(T) % (50 * w) == 7).long()[None], 1)
        seen = pairs(documents_BT, w, "blocks")
        expected = by_hand(by_hand(q, k, v, seen, 0.4).float(), k, v, seen, 0.4)
        if inside:
            out = compiled_model(q, k, v, documents_BT, window)
        else:
            plan = plan_layer(backend, documents_BT, window)
            out = compiled_layer(compiled_layer(q, k, v, plan), k, v, plan)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5, check_dtype=False)
        if trains:
            torch.autograd.grad(out, (q, k, v), dout)
    # A layer's second call gets an input in another layout: two graphs at most, made in round one.
    assert graphs.frame_count <= (1 if inside else 2)


def compiled_flex_equals_dense() -> None:
    T = 428  # the last block is 44 tokens long
    starts = torch.stack([torch.arange(T) == 10, torch.arange(T) % 90 == 7])
    documents_BT = documents_of(starts.long(), 1)
    q, k, v, _ = (x.detach() for x in inputs(2, 2, 1, T, 32))
    plan = plan_layer("flex", documents_BT, scalar(2))
    assert isinstance(plan.mask, flex_module.BlockMask)
    assert plan.mask.full_kv_num_blocks is not None
    assert plan.mask.full_kv_num_blocks[:, 0].tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    out = attend(q, k, v, plan, 0.2)
    expected = by_hand(q, k, v, pairs(documents_BT, 2, "blocks"), 0.2)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5, check_dtype=False)


def test_flex_forward_equals_dense() -> None:
    """The compiled kernel, which trusts the block lists and masks partial blocks only.

    In a process of its own: torch's kernel for CPUs, which no run of ours uses, sometimes writes
    past its buffers (pytorch/pytorch#153145). What it crashes with says nothing about our mask.
    """
    if reason := no_inductor():
        pytest.skip(f"NOT TESTED: {reason}")
    if not torch.cpu._is_avx2_supported():
        pytest.skip("NOT TESTED: torch has this kernel for CPUs with AVX2 alone")
    program = (
        f"import torch; from {__name__} import compiled_flex_equals_dense as check; "
        f"torch.set_num_threads({torch.get_num_threads()}); check()"
    )
    words, root = [sys.executable, "-c", program], Path(__file__).parents[2]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True)
    if done.returncode < 0:
        pytest.skip(f"NOT TESTED: torch's kernel died of signal {-done.returncode}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("full_blocks", [True, False])
@pytest.mark.parametrize("unit", UNITS)
def test_flex_backward_equals_dense(
    unit: WindowUnit, full_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention's eager arithmetic, its refusal to differentiate on CPU lifted."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    documents_BT = documents_of((torch.arange(384) % 170 == 7).long()[None], 1)
    window = 2 if unit == "blocks" else 150
    plan = plan_layer("flex", documents_BT, scalar(window), unit, full_blocks=full_blocks)
    assert isinstance(plan.mask, flex_module.BlockMask)
    tensors, mask = inputs(1, 2, 1, 384, 32), plan.mask
    seen = pairs(documents_BT, window, unit)

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flex_module.flex_attention(q, k, v, block_mask=mask, scale=0.2, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out

    assert_close(
        with_gradients(eager, tensors),
        with_gradients(lambda q, k, v: by_hand(q, k, v, seen, 0.2), tensors),
    )


def test_key_offset_takes_the_unrotated_half_from_the_previous_token() -> None:
    starts = torch.zeros(1, 9, dtype=torch.bool)
    starts[0, 0] = starts[0, 5] = True
    k = torch.randn(1, 9, 2, 16)
    moved = offset_keys(k, starts)
    unrotated = frequencies(16, half=True).repeat(2) == 0
    for t in range(9):
        source = t if starts[0, t] else t - 1
        assert torch.equal(moved[:, t, :, unrotated], k[:, source, :, unrotated])
        assert torch.equal(moved[:, t, :, ~unrotated], k[:, t, :, ~unrotated])


def test_keys_that_follow_a_cache_are_offset_as_all_at_once() -> None:
    """Cut anywhere: within a document, and where one ends."""
    starts = torch.zeros(2, 9, dtype=torch.bool)
    starts[:, 0] = starts[0, 5] = starts[1, 4] = True
    k = torch.randn(2, 9, 3, 16)
    room = torch.zeros(2, 3, 9, 16)
    cache, cuts = LayerCache(room, room.clone(), room[:, :, :1].clone()), [0, 3, 4, 5, 9]
    pieces = [offset_new_keys(k[:, a:b], starts[:, a:b], cache) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(pieces, dim=1), offset_keys(k, starts))


def test_one_layer_with_key_offset_can_copy_what_followed() -> None:
    """An induction head by hand: queries and keys are the token, values are the token too."""
    V, K = 32, 128
    codes = torch.randn(V, K)
    codes[:, frequencies(K, half=True).repeat(2) != 0] = 0  # match by content alone
    ids = torch.randperm(V)
    ids = torch.cat([ids, ids[:20]])
    x = codes[ids][None, None]
    documents = torch.zeros(1, len(ids), dtype=torch.int32)
    plan, found = plan_layer("dense", documents, None), {}
    moved = offset_keys(x.transpose(1, 2), plan.starts).transpose(1, 2)
    for name, k in (("offset", moved), ("plain", x)):
        seen = attend(x, k, F.one_hot(ids, V).float()[None, None], plan, 1.0)
        guess = seen[0, 0, V + 1 : -1].argmax(-1)  # the first token has none before
        found[name] = (guess == ids[V + 2 :]).float().mean().item()
    assert found["offset"] == 1.0
    assert found["plain"] < 0.2
