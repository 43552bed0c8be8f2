"""Orthogonalisation by a polynomial iteration: every singular value is pushed towards 1.

G = U S V^T goes to about U V^T with matrix products alone, so it runs at the speed of matmul.
The result is not exactly orthogonal and need not be: with the classic coefficients every singular
value above 1% of the Frobenius norm lands in [0.68, 1.13] after 5 iterations.

Two evaluations of the same polynomial. The plain one updates X itself. For fp32 matrices at least
twice as long as wide, the Gram one works on the small square X X^T and touches X only at both ends:
on 4:1 matrices 25 products where the plain one needs 45, in units of a square product.

Shapes: N matrices of m rows and n columns, m <= n after the tall ones are transposed.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from speedrun.config.optimizer import POLAR_EXPRESS_LENGTH, NamedCoefficients, iterations_problem
from speedrun.model import kernels, native
from speedrun.model.kernels.symmetric import symmetric_product
from speedrun.optim.errors import OptimError

Triple = tuple[float, float, float]
Coefficients = str | Sequence[Triple]
NAMES = get_args(NamedCoefficients)

CLASSIC: Triple = (3.4445, -4.7750, 2.0315)
# Made as a set of five: each step is the best polynomial for what the one before leaves over.
POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
NATIVE_ROWS = 256  # with all its products 1.5 MB
assert len(POLAR_EXPRESS) == POLAR_EXPRESS_LENGTH


class Iteration(NamedTuple):
    """From X = G / (margin |G| + eps): X <- a X + (b A + c A^2) X, A = X X^T, once per triple."""

    triples: tuple[Triple, ...]
    margin: float

    @property
    def slope(self) -> float:
        """By how much the tiniest singular values grow."""
        return math.prod(abs(a) for a, _, _ in self.triples) / self.margin


def iteration(coefficients: Coefficients = "classic", iterations: int = 5) -> Iteration:
    """The iteration of that name, or of the caller's own triples (then one per iteration)."""
    if isinstance(coefficients, str) and coefficients not in NAMES:
        raise OptimError(f"coefficients={coefficients!r} is unknown; use {' or '.join(NAMES)}")
    problem = iterations_problem(coefficients, iterations)
    if problem:
        raise OptimError(f"iterations is {iterations}, but {problem}")
    if coefficients == "polar_express":
        return Iteration(POLAR_EXPRESS, margin=1.02)
    triples = (CLASSIC,) * iterations if isinstance(coefficients, str) else tuple(coefficients)
    return Iteration(triples, margin=1.0)


def native_dtype(device: torch.device) -> torch.dtype:
    """bf16 on GPUs that multiply it natively, fp32 elsewhere.

    A CPU without bf16 instructions runs a bf16 matmul about 100 times slower than an fp32 one.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return torch.bfloat16
    return torch.float32


def scratch_numel(count: int, rows: int, cols: int) -> int:
    """Elements of scratch that `orthogonalize` needs for `count` matrices of rows x cols."""
    short = min(rows, cols)
    return count * (4 * short * short + rows * cols)


def orthogonalize(
    G: Tensor,
    *,
    iterations: int = 5,
    coefficients: Coefficients = "classic",
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Replace the singular values of each matrix in `G` (..., rows, cols) by about 1.

    `dtype` is that of the arithmetic and of the result; None takes the device's own choice.
    `out` may be `G` itself. With `out` and `scratch` (flat, `scratch_numel` elements, both of
    `dtype`) nothing large is allocated.

    A zero matrix gives zero. A matrix whose norm is far below `eps` fades to zero instead of being
    blown up. Entries up to the largest float are safe. A matrix with a NaN or an infinity gives
    NaN throughout, and its neighbours in the batch are not touched.
    """
    if G.ndim < 2:
        raise OptimError(
            f"orthogonalize needs a matrix (2 or more dimensions), not {tuple(G.shape)}"
        )
    chosen = iteration(coefficients, iterations)
    dtype = dtype or native_dtype(G.device)
    if out is None:
        out = torch.empty(G.shape, dtype=dtype, device=G.device)
    if G.numel() == 0:
        return out
    rows, cols = G.shape[-2:]
    if rows > cols:
        X_Nmn, out_Nmn = G.mT.reshape(-1, cols, rows), out.mT.view(-1, cols, rows)
    else:
        X_Nmn, out_Nmn = G.reshape(-1, rows, cols), out.view(-1, rows, cols)
    N, m, n = X_Nmn.shape
    if scratch is None:
        scratch = torch.empty(scratch_numel(N, m, n), dtype=dtype, device=G.device)
    gram = n >= 2 * m and _gram_is_safe(chosen, dtype)
    if _native_for(X_Nmn, out_Nmn):
        triples = torch.tensor(chosen.triples, dtype=torch.float32)
        numbers = (len(chosen.triples), chosen.margin, float(eps), int(gram))
        native.run("orthogonalize", X_Nmn, out_Nmn, triples, *numbers, N, m, n)
        return out
    squares_4Nmm = scratch[: 4 * N * m * m].view(4, N, m, m)
    spare_Nmn = scratch[4 * N * m * m : 4 * N * m * m + N * m * n].view(N, m, n)

    if gram:
        _normalise(X_Nmn, eps, chosen.margin, out=spare_Nmn)
        _gram(spare_Nmn, chosen.triples, squares_4Nmm, out=out_Nmn)
    else:
        # X changes buffers at every step; start in the one that ends in `out`.
        first, second = (spare_Nmn, out_Nmn) if len(chosen.triples) % 2 else (out_Nmn, spare_Nmn)
        _normalise(X_Nmn, eps, chosen.margin, out=first)
        _plain(first, second, chosen.triples, squares_4Nmm)
    return out


def _native_for(X_Nmn: Tensor, out_Nmn: Tensor) -> bool:
    """Small fp32 matrices on a CPU: the native routine keeps each in a core's own cache.

    It also leaves out half of what is symmetric. Larger ones need all cores at once.
    """
    small = X_Nmn.size(1) <= NATIVE_ROWS and X_Nmn.size(1) % native.WIDTH_STEP == 0
    whole = X_Nmn.size(2) % native.WIDTH_STEP == 0
    plain = X_Nmn.is_contiguous() and out_Nmn.is_contiguous()
    alike = X_Nmn.dtype == out_Nmn.dtype == torch.float32 and X_Nmn.device.type == "cpu"
    return small and whole and plain and alike and not isinstance(native.load(), str)


def matmul_flops(rows: int, cols: int, *, gram: bool, iterations: int = 5) -> int:
    """Floating-point operations of the products for one matrix."""
    m, n = min(rows, cols), max(rows, cols)
    if gram:
        return 2 * m * m * (2 * n + (4 * iterations - 3) * m)
    return 2 * iterations * m * m * (2 * n + m)


def _gram_is_safe(chosen: Iteration, dtype: torch.dtype) -> bool:
    """Rounding of X X^T grows with the square of the slope; keep that bound near a tenth.

    In fp32 the bound is 0.03 for classic and 0.11 for Polar Express; on singular values spread over
    six decades the spectral error measured is 5e-4 and 4e-3. bf16 never qualifies.
    """
    return chosen.slope**2 * torch.finfo(dtype).eps < 0.12


def _normalise(X_Nmn: Tensor, eps: float, margin: float, *, out: Tensor) -> None:
    """out = X / (margin |X|_F + eps), by way of X / max|X| so that no square overflows."""
    # Both ends by amax and amin: on a CPU 30 times faster than the infinity norm.
    high_N, low_N = X_Nmn.amax((1, 2), keepdim=True), X_Nmn.amin((1, 2), keepdim=True)
    largest_N = torch.maximum(high_N, -low_N).float().clamp_(min=torch.finfo(torch.float32).tiny)
    torch.div(X_Nmn, largest_N, out=out)
    wide = torch.promote_types(out.dtype, torch.float32)
    norm_N = torch.linalg.vector_norm(out, dim=(1, 2), keepdim=True, dtype=wide)
    out.div_(norm_N.mul_(margin).add_(eps / largest_N))


def _plain(X_Nmn: Tensor, other_Nmn: Tensor, triples: Sequence[Triple], work: Tensor) -> None:
    """Iterate, swapping X and the other buffer; b A + c A^2 is formed first, then one product."""
    A_Nmm, B_Nmm = work[0], work[1]
    # a I + b A + c A^2 saves a copy of X per step, but in bf16 the diagonal would drown the rest.
    one_product = X_Nmn.dtype in (torch.float32, torch.float64)
    half = kernels.multiply(X_Nmn, X_Nmn.dtype)  # on a GPU, of what is symmetric
    for a, b, c in triples:
        if half:
            symmetric_product(X_Nmn, A_Nmm)
            symmetric_product(A_Nmm, B_Nmm, alpha=c, add_Nmm=A_Nmm, beta=b)
        else:
            torch.bmm(X_Nmn, X_Nmn.mT, out=A_Nmm)
            torch.baddbmm(A_Nmm, A_Nmm, A_Nmm, beta=b, alpha=c, out=B_Nmm)
        if one_product:
            B_Nmm.diagonal(dim1=1, dim2=2).add_(a)
            torch.bmm(B_Nmm, X_Nmn, out=other_Nmn)
        else:
            torch.baddbmm(X_Nmn, B_Nmm, X_Nmn, beta=a, out=other_Nmn)
        X_Nmn, other_Nmn = other_Nmn, X_Nmn


def _gram(X_Nmn: Tensor, triples: Sequence[Triple], work: Tensor, *, out: Tensor) -> None:
    """The same polynomial as P X: each step multiplies P by B = a I + b A + c A^2, and A by B^2."""
    A_Nmm, B_Nmm, P_Nmm, T_Nmm = work.unbind()
    torch.bmm(X_Nmn, X_Nmn.mT, out=A_Nmm)
    for i, (a, b, c) in enumerate(triples):
        torch.baddbmm(A_Nmm, A_Nmm, A_Nmm, beta=b, alpha=c, out=B_Nmm)
        B_Nmm.diagonal(dim1=1, dim2=2).add_(a)
        if i + 1 < len(triples):
            torch.bmm(B_Nmm, A_Nmm, out=T_Nmm)
            torch.bmm(T_Nmm, B_Nmm, out=A_Nmm)
        if i == 0:
            P_Nmm, B_Nmm = B_Nmm, P_Nmm
        else:
            torch.bmm(B_Nmm, P_Nmm, out=T_Nmm)
            P_Nmm, T_Nmm = T_Nmm, P_Nmm
    torch.bmm(P_Nmm, X_Nmn, out=out)
