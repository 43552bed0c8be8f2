"""Attention written out over a dense mask in float64, and inputs to compare it with others on."""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from speedrun.model.attention import attend
from speedrun.model.plan import LayerPlan


def inputs(B: int, H: int, KV: int, T: int, K: int, seed: int = 0) -> list[Tensor]:
    """q, k, v that ask for gradients, heads inside tokens as in the model; a gradient of out."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(B, T, heads, K) for heads in (H, KV, KV, H)]
    parts = [torch.randn(shape, generator=g).transpose(1, 2) for shape in shapes]
    return [x.requires_grad_() for x in parts[:3]] + parts[3:]


def by_hand(q: Tensor, k: Tensor, v: Tensor, seen_BTT: Tensor, scale: float) -> Tensor:
    """softmax over what is seen, in float64."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = (q.double() @ k.mT * scale).masked_fill(~seen_BTT[:, None], -torch.inf)
    return scores.softmax(-1) @ v


def with_gradients(
    run: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: list[Tensor]
) -> tuple[Tensor, ...]:
    q, k, v, dout = tensors
    out = run(q, k, v)
    return out, *torch.autograd.grad(out, (q, k, v), dout.to(out.dtype))


def assert_attends(tensors: list[Tensor], plan: LayerPlan, seen_BTT: Tensor, scale: float) -> None:
    """`attend` and its gradients are those of attention over the pairs that are seen."""
    expected = with_gradients(lambda q, k, v: by_hand(q, k, v, seen_BTT, scale), tensors)
    assert_close(with_gradients(partial(attend, plan=plan, scale=scale), tensors), expected)


def assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        assert a.shape == b.shape, name
        # Sums cancel, so an entry's error goes with the tensor's largest, not with its own size.
        # Where a query sees itself alone the true gradient is 0, and scores of 10 cancel to 1e-5.
        wrong = (a - b).abs() > 2e-5 * max(5.0, b.abs().max().item()) + 1e-4 * b.abs()
        assert not wrong.any(), f"{name} is off by up to {(a - b).abs().max():.2e}"


@cache
def no_inductor() -> str:
    """Why torch's compiler cannot build for this CPU: it needs a compiler and Python's headers."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8))
    except Exception as error:  # of many kinds, wrapped
        return f"inductor builds nothing here: {str(error).splitlines()[0]}"
    return ""
