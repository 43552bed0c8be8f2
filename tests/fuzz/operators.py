"""The operators in Python on sanitized kernels: what reaches C++ is what was meant, or is refused.

`python -m tests.fuzz.operators LIBRARY`, with the sanitizers' libraries preloaded, runs the cases
whose numbers it reads from its input and answers each with its name:
torch takes its memory from them then, so that an access beside any tensor ends the process. Tensors
are views of others now and then; values and gradients are compared with those of torch's own code.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable
from random import Random

import numpy as np
import torch
from torch import Tensor

from speedrun.model import fused, native, products
from speedrun.model.block_sparse import block_sparse_attention
from speedrun.model.native.prebuilt import Found
from speedrun.model.native.signatures import ROUTINES, Parameter, parameters_of
from speedrun.optim.orthogonalize import orthogonalize
from speedrun.serve.sampling import Sampler, Sampling, draw, drawn
from tests.model.test_decode import ODD, decoded, decoder_of, expected_of
from tests.model.test_gpt import SWITCH_SETS, ids_of, lively
from tests.model.twins import torch_only, with_gradients


class Case:
    def __init__(self, number: int) -> None:
        self.rng = Random(number)
        torch.manual_seed(number)
        torch.set_num_threads(self.rng.randint(1, 3))

    def size(self, most: int = 70) -> int:
        return self.rng.choice((1, 2, 31, 32, 33, 47, 48, 64, self.rng.randint(1, most)))

    def wide(self, most: int = 8) -> int:
        return 16 * self.rng.randint(1, most)

    def tensor(self, *shape: int) -> Tensor:
        """Of normal numbers; plain, a part of a larger one, or turned round."""
        how = self.rng.randrange(3)
        if how == 0 or len(shape) < 2:
            return torch.randn(shape)
        if how == 1:
            return torch.randn(*shape[:-1], shape[-1] + 3)[..., 1:-2]
        return torch.randn(*shape[:-2], shape[-1], shape[-2]).mT

    def angles(self, *shape: int) -> tuple[Tensor, Tensor]:
        turned = torch.randn(shape)
        return turned.cos(), turned.sin()

    def same(self, run: Callable[..., Tensor], *inputs: Tensor, rough: float = 1e-4) -> None:
        found = with_gradients(run, *inputs)
        with torch_only():
            expected = with_gradients(run, *inputs)
        for a, b in zip(found, expected, strict=True):
            size = b.abs().max().item() if b.numel() else 0.0
            torch.testing.assert_close(a, b, rtol=1e-4, atol=rough * size + 1e-5)


def linear(case: Case) -> None:
    rows, I, O = case.size(), case.wide(), case.wide()  # noqa: E741
    x, w = case.tensor(2, rows, I), case.tensor(O, I)
    case.same(products.linear, x, w)
    stream = case.tensor(2, rows, O)
    case.same(lambda s, x, w: products.add_linear(s, x, w, 0.5), stream, x, w)


def mlp(case: Case) -> None:
    rows, D, F = case.size(), case.wide(), case.wide()
    up, down = case.tensor(F, D) / D**0.5, case.tensor(D, F) / F**0.5
    case.same(lambda x, u, d: products.add_mlp(x, u, d, 1e-6), case.tensor(2, rows, D), up, down)


def qkv(case: Case) -> None:
    T, D, K, G = case.size(), case.wide(), 16 * case.rng.randint(1, 4), case.rng.randint(1, 3)
    H, normed = G * case.rng.randint(1, 3), case.rng.random() < 0.5
    angles = case.angles(T, K // 2) if case.rng.random() < 0.5 else None

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        parts = products.norm_qkv(x, weights, angles, K, 1e-6, qk_norm=normed)
        return torch.cat([part.flatten() for part in parts])

    case.same(run, case.tensor(2, T, D), *(case.tensor(heads * K, D) for heads in (H, G, G)))


def head(case: Case) -> None:
    rows, D, V = case.size(), case.wide(6), case.rng.randint(1, 300)
    x, w, cap = case.tensor(1, rows, D), case.tensor(V, D), case.rng.choice((0.0, 15.0))
    targets = torch.randint(0, V, (1, rows))
    case.same(lambda x, w: products.head_loss(x, w, targets, cap), x, w)
    found = products.token_losses(x[0], w, targets[0], cap)
    with torch_only():
        expected = products.token_losses(x[0], w, targets[0], cap)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    targets[0, case.rng.randrange(rows)] = case.rng.choice((V, -1, 2**62, -(2**63)))
    if rows >= products.FEWEST:
        refused(lambda: products.head_loss(x, w, targets, cap))


def elementwise(case: Case) -> None:
    B, T, H, K = case.rng.randint(1, 2), case.size(), case.rng.randint(1, 3), case.size()
    x = case.tensor(B, H, T, 2 * K)
    cos, sin = case.angles(T, K)
    eps = case.rng.choice((None, 1e-6))
    case.same(lambda x: fused.rotate(x, cos, sin, eps), x)
    case.same(lambda x: fused.rms_norm(x, 1e-6), x)
    case.same(fused.relu_squared, x)
    case.same(fused.blend, x, case.tensor(B, H, T, 2 * K), torch.randn(()), torch.randn(()))
    starts = torch.rand(B, T) < 0.2
    case.same(lambda k: fused.offset_keys(k, starts), case.tensor(B, T, H, 4 * K))
    if T > 1:
        refused(lambda: fused.offset_keys(torch.randn(B, T, H, 4), starts[:, 1:]))
        refused(lambda: fused.blend(x, x[:, :, 1:], torch.randn(()), torch.randn(())))


def attention(case: Case) -> None:
    B, KV, T, K = case.rng.randint(1, 2), case.rng.randint(1, 2), case.size(200), case.wide(16)
    H, t = KV * case.rng.randint(1, 3), torch.arange(T, dtype=torch.int32)
    window = case.rng.randint(1, T)
    first = (t + 1 - window).clamp(min=0).expand(B, T)
    parts = [case.tensor(B, heads, T, K) for heads in (H, KV, KV)]
    case.same(lambda q, k, v: block_sparse_attention(q, k, v, first, 0.2)[0], *parts, rough=1e-3)
    q, k, v = parts
    bad = first.clone()
    bad[case.rng.randrange(B), case.rng.randrange(T)] = case.rng.choice((-1, T, 2**31 - 1))
    refused(lambda: block_sparse_attention(q, k, v, bad, 0.2))
    refused(lambda: block_sparse_attention(q, k, v[:, :, :, : K - 1], first, 0.2))
    kernel = native.load()
    assert isinstance(kernel, native.Kernel)
    large = torch.randn(1, 1, 2, 272)  # wider than the kernel's tiles
    sums = torch.empty(1, 1, 2)
    refused(
        lambda: kernel.attention(
            "attention_forward", large, large, large, t[:2][None] * 0, 0.2, large.clone(), sums
        )
    )


def muon(case: Case) -> None:
    G = case.tensor(case.rng.randint(1, 3), case.wide(6), case.wide(6)).contiguous()
    name = case.rng.choice(("classic", "polar_express"))
    found = orthogonalize(G, coefficients=name)
    with torch_only():
        expected = orthogonalize(G, coefficients=name)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def token(case: Case) -> None:
    model = lively(**case.rng.choice([*SWITCH_SETS, *ODD]))
    ids = ids_of(length=case.rng.randint(1, 20))[0].tolist()
    found, expected = decoded(decoder_of(model), ids), expected_of(model, ids)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def sampling(case: Case) -> None:
    size = case.size(300)
    texts, expected = [], []
    for _ in range(case.rng.randint(1, 4)):
        options = Sampling(
            case.rng.choice((0.0, 0.5, 1.0, 1e-320)), case.rng.choice((0, 1, 7, size, 2**31 - 1)),
            case.rng.choice((0.0, 0.5, 1.0)), case.rng.choice((1.0, 1.5)), case.rng.randrange(9),
        )  # fmt: skip
        logits = np.random.default_rng(case.rng.randrange(99)).normal(size=size).astype(np.float32)
        texts.append((Sampler(options, [0]), logits))
        other = Sampler(options, [0])
        expected.append(drawn(other.scores(logits), options, other.uniform()))
    found = draw(texts)
    near = [options.options.top_p in (0.0, 1.0) for options, _ in texts]  # else sums may round
    assert [a for a, sure in zip(found, near, strict=True) if sure] == [
        b for b, sure in zip(expected, near, strict=True) if sure
    ]


def any_call(case: Case) -> None:
    """A call of any routine as its signature says, then with one argument that does not fit."""
    routine = case.rng.choice(ROUTINES)
    parameters = parameters_of(routine)
    sizes = {one.name: case.wide(4) for one in parameters if one.dtype is None and not one.real}
    sizes |= {name: 1 for name in ("gram", "count") if name in sizes}
    if "T" in sizes:
        sizes["rows" if "rows" in sizes else "tokens"] = sizes["T"]

    def made(one: Parameter) -> Tensor | float:
        if one.dtype is None:
            return 0.5 if one.real else sizes[one.name]
        count = math.prod(sizes[part] if isinstance(part, str) else part for part in one.size)
        count //= 1 + one.halved
        return (
            torch.zeros(count, dtype=one.dtype) if one.dtype == torch.int64 else torch.rand(count)
        )

    arguments: list[Tensor | float | None] = [*map(made, parameters)]
    native.run(routine, *arguments)
    place = case.rng.randrange(len(arguments))
    one, right = parameters[place], arguments[place]
    wrong: Tensor | float | None
    if isinstance(right, Tensor):
        wrong = case.rng.choice((right[1:], torch.cat([right, right]), right.double(), 0.5))
    else:
        wrong = case.rng.choice((torch.ones(1), None) if one.real else (-1, 0.5))
    refused(lambda: native.run(routine, *arguments[:place], wrong, *arguments[place + 1 :]))
    refused(lambda: native.run(routine, *arguments[:-1]))


def refused(call: Callable[[], object]) -> None:
    try:
        call()
    except (ValueError, TypeError, RuntimeError):
        return
    raise AssertionError("what does not fit was not refused")


CASES = (linear, mlp, qkv, head, elementwise, attention, muon, token, sampling, any_call)


def main(library: str) -> None:
    kernel = native.Kernel(Found(ctypes.CDLL(library), "sanitized", "the test says so"))
    native.load = lambda: kernel  # type: ignore[assignment]
    for line in sys.stdin:
        run = CASES[int(line) % len(CASES)]
        run(Case(int(line)))
        print(run.__name__, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
