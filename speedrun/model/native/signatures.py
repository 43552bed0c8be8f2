"""What each routine of the kernels takes, and the check of every call before it is made.

C++ is given addresses and believes the sizes beside them: of a tensor that is smaller than they
say, it would read what lies behind. So all tensors of a call are held against its sizes. These
checks stay where Python runs without asserts (`python -O`). Sizes that a routine does not know how
to compute with, and values such as ids outside of the vocabulary, it refuses itself.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# In the order of the C arguments, the number of threads left out. A tensor has its size in
# brackets, a mark > if it is written and ? if it may be None; of numbers the whole ones are sizes.
_ANGLES = "cos[T*K/2]? sin[T*K/2]?"
_WEIGHTS = "Wq[H*K*D] Wk[G*K*D] Wv[G*K*D]"
_HEADS = "q[rows*H*K] k[rows*G*K]"
_TEXTS = {
    "linear_forward": "h[rows*I] W[O*I] x[rows*O]? float:factor >y[rows*O] rows I O",
    "linear_backward": "g[rows*O] x[rows*I] W[O*I] >dx[rows*I] >dW[O*I] rows I O",
    "mlp_forward": "x[rows*D] up[F*D] down[D*F] float:eps >r[rows] >h[rows*F] >y[rows*D] rows D F",
    "mlp_backward": "g[rows*D] x[rows*D] r[rows] h[rows*F] up[F*D] down[D*F] "
    ">dx[rows*D] >dup[F*D] >ddown[D*F] rows D F",
    "qkv_forward": f"x[rows*D] {_WEIGHTS} {_ANGLES} float:eps >r[rows] >q[rows*H*K] >k[rows*G*K] "
    ">v[rows*G*K] >rq[rows*H]? >rk[rows*G]? rows T D H G K",
    "qkv_backward": f"dq[rows*H*K] dk[rows*G*K] dv[rows*G*K] {_HEADS} rq[rows*H]? rk[rows*G]? "
    f"x[rows*D] r[rows] {_WEIGHTS} {_ANGLES} >dx[rows*D] >dWq[H*K*D] >dWk[G*K*D] >dWv[G*K*D] "
    "rows T D H G K",
    "norm_rotate_forward": f"x[tokens*H*K] {_ANGLES} float:eps >y[tokens*H*K] >r[tokens*H]? "
    "tokens T H K",
    "norm_rotate_backward": f"g[tokens*H*K] y[tokens*H*K] r[tokens*H]? {_ANGLES} "
    ">dx[tokens*H*K] tokens T H K",
    "offset_keys_forward": "k[tokens*H*K] starts[tokens] >y[tokens*H*K] tokens T H K",
    "offset_keys_backward": "g[tokens*H*K] starts[tokens] >dk[tokens*H*K] tokens T H K",
    "relu_squared_forward": "x[size] >y[size] size",
    "relu_squared_backward": "g[size] y[size] >dx[size] size",
    "blend_forward": "x[size] y[size] a[1] b[1] >z[size] size",
    "blend_backward": "g[size] x[size] y[size] a[1] b[1] >dx[size] >dy[size] >da[1] >db[1] size",
    "head_loss": "x[rows*D] W[V*D] ids:targets[rows] float:cap >loss[1] >dx[rows*D]? >dW[V*D]? "
    "rows D V",
    "token_losses": "x[rows*D] W[V*D] ids:targets[rows] float:cap >losses[rows] rows D V",
    "orthogonalize": "G[N*m*n] >out[N*m*n] triples[3*count] count float:margin float:eps gram "
    "N m n",
}  # fmt: skip
_WORD = re.compile(r"(?:(float|ids):)?(>?)(\w+)(?:\[([\w*]+)(/2)?\](\??))?")


@dataclass(frozen=True)
class Parameter:
    name: str
    dtype: torch.dtype | None = None  # of a tensor
    size: tuple[str | int, ...] = ()  # of a tensor: the factors of its number of elements
    halved: bool = False
    written: bool = False
    optional: bool = False
    real: bool = False  # a number that is no size


def _parameter(word: str) -> Parameter:
    found = _WORD.fullmatch(word)
    assert isinstance(found, re.Match), word
    kind, written, name, size, halved, optional = found.groups()
    if size is None:
        return Parameter(name, real=kind == "float")
    factors = tuple(int(part) if part.isdigit() else part for part in size.split("*"))
    dtype = torch.int64 if kind == "ids" else torch.float32
    return Parameter(name, dtype, factors, bool(halved), bool(written), bool(optional))


@functools.cache
def parameters_of(routine: str) -> tuple[Parameter, ...]:
    return tuple(_parameter(word) for word in _TEXTS[routine].split())


ROUTINES = tuple(_TEXTS)


@functools.cache
def _places(routine: str) -> tuple[list[int], list[int], list[tuple[Any, ...]]]:
    """Where sizes and other numbers stand, and what each tensor must be, by place."""
    parameters = parameters_of(routine)
    place = {one.name: i for i, one in enumerate(parameters)}
    tensors = [
        (i, one.dtype, [place[part] for part in one.size if isinstance(part, str)],
         math.prod(part for part in one.size if isinstance(part, int)), 1 + one.halved)
        for i, one in enumerate(parameters)
        if one.dtype is not None
    ]  # fmt: skip
    numbers = [i for i, one in enumerate(parameters) if one.dtype is None]
    real = [i for i in numbers if parameters[i].real]
    return [i for i in numbers if i not in real], real, tensors


def checked(
    routine: str, arguments: Sequence[Tensor | float | None]
) -> list[Tensor | int | float | None]:
    """The arguments as C++ can take them: contiguous tensors of the sizes stated, and numbers.

    Written for speed as long as all is well, since a step makes a hundred calls.
    """
    sizes, real, tensors = _places(routine)
    made: list[Any] = [*arguments]
    if len(made) != len(sizes) + len(real) + len(tensors):
        raise TypeError(f"{routine} takes other arguments than these {len(made)}")
    for i in sizes:
        if type(made[i]) is not int or made[i] < 0:
            raise TypeError(f"{routine} takes whole sizes that are not negative, not {made[i]!r}")
    for i in real:
        made[i] = _number(routine, parameters_of(routine)[i], made[i])
    for i, dtype, factors, count, divisor in tensors:
        x = made[i]
        for factor in factors:
            count *= made[factor]
        if (
            not isinstance(x, Tensor)
            or x.dtype is not dtype
            or x.numel() != count // divisor
            or not x.is_cpu
            or not x.is_contiguous()
        ):
            made[i] = _checked(routine, parameters_of(routine)[i], x, count // divisor)
    return made


def _number(routine: str, parameter: Parameter, x: Tensor | float | None) -> float:
    if isinstance(x, Tensor) or x is None:
        raise TypeError(f"{routine} takes {parameter.name} as a number")
    return float(x)


def _checked(
    routine: str, parameter: Parameter, x: Tensor | float | None, size: int
) -> Tensor | None:
    """A tensor that is not at once what it should be: None, copied into one piece, or refused."""
    if x is None and parameter.optional:
        return None
    wrong = ""
    if not isinstance(x, Tensor) or x.dtype != parameter.dtype or x.device.type != "cpu":
        wrong = f"as a tensor of {parameter.dtype} on the CPU"
    elif x.numel() != size:
        wrong = f"with {size} elements by its sizes, not {tuple(x.shape)}"
    elif parameter.written:
        wrong = "in one piece, to write to it"
    else:
        return x.contiguous()
    raise ValueError(f"{routine} takes {parameter.name} {wrong}")
