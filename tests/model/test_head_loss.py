"""Head and loss: the routine that makes both, and all gradients, against torch and float64."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from speedrun.model import native, products
from speedrun.model.fused import softcap
from speedrun.model.products import head_loss, token_losses
from tests.waiting import PATIENCE

from .twins import (
    Inputs,
    assert_same_ends,
    assert_twins,
    every_build,
    native_only,
    normal,
    routines,
    targets_of,
    torch_only,
    weight,
    with_gradients,
)

pytestmark = pytest.mark.usefixtures("_however_few_rows")

# Rows, width, vocabulary: none a whole vector, block or chunk of the routine's.
HEADS = [(1, 16, 17), (31, 48, 257), (32, 192, 64), (97, 80, 1001), (385, 48, 17), (769, 16, 257)]


@every_build
@pytest.mark.parametrize("cap", [0.0, 15.0])
@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 20.0, 500.0])
@pytest.mark.parametrize(("rows", "D", "V"), HEADS)
def test_head_loss(rows: int, D: int, V: int, size: float, cap: float) -> None:
    targets = targets_of(rows, V)
    # Logits go with the size of x, and with it the rounding of a product of either kind; the
    # gradient of a logit, at most 1, is known to fp32's last bit or to that rounding.
    floor = 2e-6 * max(1.0, size)
    run: Callable[..., Tensor] = lambda x, w: head_loss(x, w, targets, cap)  # noqa: E731
    assert_twins(run, size * normal(1, rows, D), weight(V, D), floor=floor)


def in_torch(x: Tensor, head: Tensor, targets: Tensor, cap: float) -> Inputs:
    """Each row's loss, and the gradients of their mean, in the type of the inputs."""
    x, head = x.clone().requires_grad_(), head.clone().requires_grad_()
    losses = torch.nn.functional.cross_entropy(softcap(x @ head.mT, cap), targets, reduction="none")
    return losses.detach(), *torch.autograd.grad(losses.mean(), (x, head))


def assert_as_exact(ours: Inputs, theirs: Inputs, exact: Inputs) -> None:
    """Ours may err by twice as much as theirs, or by a few roundings of the largest."""
    for a, b, c in zip(ours, theirs, exact, strict=True):
        unit = torch.finfo(torch.float32).eps * c.abs().max().item()
        mine, other = ((x.double() - c).abs().max().item() for x in (a, b))
        assert mine <= 2 * max(other, unit / 4), (mine, other, unit)


@every_build
@pytest.mark.parametrize("cap", [0.0, 15.0, 16.0])
@pytest.mark.parametrize(("V", "size"), [(257, 1e-3), (2048, 4.0), (2048, 60.0), (50_304, 4.0)])
def test_softmax_and_softcap_are_as_exact_as_torch(V: int, size: float, cap: float) -> None:
    """Both in fp32 against float64, of logits that no product has rounded: x is the identity.

    In every row's logsumexp and in their mean, where errors that all go one way show; in the
    gradient of every logit, which is the head's. The loss of the batch may be off by one rounding.
    """
    x, head, targets = torch.eye(96), size * normal(V, 96), torch.arange(96) * (V // 96)
    theirs = in_torch(x, head, targets, cap)
    exact = in_torch(x.double(), head.double(), targets, cap)
    loss, _, dhead = products._head_loss(x, head, targets, cap, True)
    assert_as_exact((dhead,), theirs[2:], exact[2:])
    assert abs(loss - exact[0].mean()) <= torch.finfo(torch.float32).eps * exact[0].mean()
    # Row by row, and at the target a logit of 0: a row's loss is then its logsumexp.
    x, head, targets = torch.eye(16), head[:, :16].contiguous(), targets[:16]
    head[targets, torch.arange(16)] = 0
    each = [products._head_loss(x[i : i + 1], head, targets[i : i + 1], cap, False)[0]
            for i in range(16)]  # fmt: skip
    rows = (
        torch.stack(each),
        in_torch(x, head, targets, cap)[0],
        in_torch(x.double(), head.double(), targets, cap)[0],
    )
    assert_as_exact(*((row, row.double().mean()) for row in rows))


@every_build
@pytest.mark.parametrize("cap", [0.0, 15.0])
@pytest.mark.parametrize(
    ("rows", "V", "size"), [(96, 257, 1e-3), (400, 1001, 4.0), (96, 1001, 60.0), (8, 50_304, 4.0)]
)
def test_products_and_loss_are_as_exact_as_torch(
    rows: int, V: int, size: float, cap: float
) -> None:
    x, head, targets = size * normal(rows, 80), weight(V, 80), targets_of(rows, V)[0]
    loss, dx, dhead = products._head_loss(x, head, targets, cap, True)
    theirs = in_torch(x, head, targets, cap)
    exact = in_torch(x.double(), head.double(), targets, cap)
    assert_as_exact(
        (loss, dx, dhead), (theirs[0].mean(), *theirs[1:]), (exact[0].mean(), *exact[1:])
    )


@every_build
@pytest.mark.parametrize("cap", [0.0, 15.0])
@pytest.mark.parametrize("size", [1e-3, 1.0, 20.0])
@pytest.mark.parametrize(("rows", "D", "V"), HEADS)
def test_the_loss_of_every_token(rows: int, D: int, V: int, size: float, cap: float) -> None:
    """Against torch, against float64, and against their mean."""
    x, head, targets = size * normal(rows, D), weight(V, D), targets_of(rows, V)[0]
    with routines() as called:
        each = token_losses(x, head, targets, cap)
    assert called == ["token_losses"]
    with torch_only():
        twin = token_losses(x, head, targets, cap)
    exact = in_torch(x.double(), head.double(), targets, cap)[0]
    for found in (each, twin):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=2e-6 * max(1.0, size))
    mean = head_loss(x[None], head, targets[None], cap)
    torch.testing.assert_close(each.double().mean().float(), mean, rtol=1e-6, atol=1e-7)


@native_only
def test_the_loss_of_a_token_is_only_looked_at() -> None:
    x, head = normal(40, 16).requires_grad_(), normal(50, 16).requires_grad_()
    targets = targets_of(40, 50)[0]
    assert not token_losses(x, head, targets, 15.0).requires_grad
    with torch_only():
        assert not token_losses(x, head, targets, 15.0).requires_grad
    with pytest.raises(ValueError, match="an id of the vocabulary"):
        token_losses(x, head, targets + 1, 15.0)


@every_build
@pytest.mark.parametrize("cap", [0.0, 15.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("spoilt", ["x", "head"])
def test_what_is_not_finite_in_head_and_loss_ends_as_in_torch(
    spoilt: str, bad: float, cap: float
) -> None:
    x, head, targets = normal(1, 40, 16), normal(50, 16, seed=1), targets_of(40, 50)
    if spoilt == "x":
        x[0, 7, 3] = bad
    else:
        head[9, 3] = bad
    assert_same_ends(lambda x, head: head_loss(x, head, targets, cap), x, head)


@every_build
def test_targets_outside_the_vocabulary_are_refused() -> None:
    for target in (-1, 50):
        targets = torch.zeros(1, 40, dtype=torch.int64)
        targets[0, 33] = target
        with pytest.raises(ValueError, match="an id of the vocabulary"):
            head_loss(normal(1, 40, 16), normal(50, 16), targets, 0.0)


@native_only
def test_targets_in_another_type_are_refused() -> None:
    """Read as they are, they would be other targets."""
    targets = torch.zeros(1, 40, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"targets as a tensor of torch\.int64"):
        head_loss(normal(1, 40, 16), normal(50, 16), targets, 0.0)


@native_only
def test_a_loss_that_is_only_looked_at_makes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    run = native.run

    def noted(name: str, *arguments: Tensor | float | None) -> None:
        asked.append(arguments[5] is not None and arguments[6] is not None)
        run(name, *arguments)

    monkeypatch.setattr(native, "run", noted)
    x, head, targets = normal(1, 40, 16), normal(50, 16).requires_grad_(), targets_of(40, 50)
    trained = head_loss(x, head, targets, 15.0)
    with torch.no_grad():
        looked_at = head_loss(x, head, targets, 15.0)
    frozen = head_loss(x, head.detach(), targets, 15.0)
    assert asked == [True, False, False]
    assert torch.equal(trained, looked_at)
    assert torch.equal(trained, frozen)
    assert not looked_at.requires_grad
    assert not frozen.requires_grad


@native_only
@pytest.mark.parametrize("learns", ["x", "head"])
def test_one_of_stream_and_head_may_be_frozen(learns: str) -> None:
    x, head, targets = normal(1, 40, 16), normal(50, 16), targets_of(40, 50)
    leaf = (x if learns == "x" else head).requires_grad_()
    (alone,) = torch.autograd.grad(head_loss(x, head, targets, 15.0), leaf)
    both = with_gradients(lambda x, head: head_loss(x, head, targets, 15.0), x, head)
    scale = torch.randn((), generator=torch.Generator().manual_seed(9))
    torch.testing.assert_close(alone * scale, both[1 if learns == "x" else 2])


@native_only
def test_microbatches_add_up() -> None:
    """Thirds of a batch, each loss divided by three: the gradients of the whole."""
    x, head, targets = normal(6, 40, 16), normal(50, 16), targets_of(240, 50).view(6, 40)
    whole_head, parts_head = (head.clone().requires_grad_() for _ in range(2))
    whole_x, parts_x = (x.clone().requires_grad_() for _ in range(2))
    head_loss(whole_x, whole_head, targets, 15.0).backward()  # type: ignore[no-untyped-call]
    for rows in (slice(0, 2), slice(2, 4), slice(4, 6)):
        loss = head_loss(parts_x[rows], parts_head, targets[rows], 15.0) / 3
        loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(parts_head.grad, whole_head.grad)
    torch.testing.assert_close(parts_x.grad, whole_x.grad)


MEMORY = """
import torch
from speedrun.hardware import peak_memory_bytes  # a child's ru_maxrss begins with its parent's
from speedrun.model import fused, native, products
from speedrun.model.products import head_loss, token_losses
assert isinstance(native.load(), native.Kernel)
torch.set_num_threads(2)

def grown(rows):
    x, head = torch.randn(1, rows, 16).requires_grad_(), torch.randn(V, 16).requires_grad_()
    targets = torch.randint(V, (1, rows))
    before = peak_memory_bytes()
    head_loss(x, head, targets, 15.0).backward()
    assert x.grad is not None and head.grad is not None
    return (peak_memory_bytes() - before) / 2**20

V = 32_768
head_loss(torch.randn(1, 64, 16), torch.randn(64, 16).requires_grad_(),
          torch.zeros(1, 64, dtype=torch.int64), 15.0).backward()
print(grown(8192))
fused._available = lambda: False
print(grown(1024))
"""


def test_the_logits_of_a_batch_are_never_in_memory() -> None:
    """A gigabyte of logits, forward and backward; then torch's way with an eighth of them."""
    if isinstance(native.load(), str) or sys.platform != "linux":
        pytest.skip(f"NOT TESTED: peak memory of the native loss: {native.load()}")
    words = [sys.executable, "-c", MEMORY]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    native_mb, torch_mb = map(float, done.stdout.split())
    assert native_mb < 160
    assert torch_mb > 128  # what the measure says where logits are kept
