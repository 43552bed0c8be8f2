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


def checked(
    routine: str, arguments: Sequence[Tensor | float | None]
) -> list[Tensor | int | float | None]:
    """The arguments as C++ can take them: contiguous tensors of the sizes stated, and numbers."""
    parameters = parameters_of(routine)
    if len(arguments) != len(parameters):
        raise TypeError(f"{routine} takes {len(parameters)} arguments, not {len(arguments)}")
    sizes = {
        parameter.name: x
        for parameter, x in zip(parameters, arguments, strict=True)
        if parameter.dtype is None and not parameter.real
    }
    if not all(isinstance(size, int) and size >= 0 for size in sizes.values()):
        raise TypeError(f"{routine} takes sizes that are whole and not negative, not {sizes}")
    return [
        _checked(routine, parameter, x, sizes)  # type: ignore[arg-type]  # sizes are integers
        for parameter, x in zip(parameters, arguments, strict=True)
    ]


def _checked(
    routine: str, parameter: Parameter, x: Tensor | float | None, sizes: dict[str, int]
) -> Tensor | int | float | None:
    def wrong(what: str) -> ValueError:
        return ValueError(f"{routine} takes {parameter.name} {what}")

    if parameter.dtype is None:
        if isinstance(x, Tensor) or x is None:
            raise wrong("as a number")
        return float(x) if parameter.real else int(x)
    if x is None and parameter.optional:
        return None
    if not isinstance(x, Tensor) or x.dtype != parameter.dtype or x.device.type != "cpu":
        raise wrong(f"as a tensor of {parameter.dtype} on the CPU")
    size = math.prod(sizes[part] if isinstance(part, str) else part for part in parameter.size)
    if x.numel() != (size // 2 if parameter.halved else size):
        stated = "*".join(map(str, parameter.size)) + ("/2" if parameter.halved else "")
        raise wrong(f"with {stated} elements by {sizes}, not {tuple(x.shape)}")
    if parameter.written and not x.is_contiguous():
        raise wrong("in one piece, to write to it")
    return x.contiguous()
