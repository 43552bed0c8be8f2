"""Single values and tensors: how they are written, told and compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from speedrun.traces import as_bytes

# As safetensors writes them; others are written as bytes.
NATURAL = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)


def constant(value: Any) -> Any:
    """What never changes, but is no JSON."""
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"is": "number", "dtype": value.dtype.str, "of": value.tobytes().hex()}
    if isinstance(value, torch.dtype):
        return {"is": "dtype", "of": str(value).removeprefix("torch.")}
    if type(value) is torch.Size:
        return {"is": "size", "of": list(value)}
    if type(value) is complex:
        return {"is": "complex", "of": [repr(value.real), repr(value.imag)]}
    return None


def tensor_problem(value: Tensor) -> str:
    """Why a tensor cannot be written; empty if it can."""
    if type(value) not in (Tensor, nn.Parameter):
        return f"a {type(value).__name__}, which is a tensor of a kind of its own"
    if value.layout is not torch.strided:
        return f"a {str(value.layout).removeprefix('torch.')} tensor"
    if value.is_quantized or value.is_conj() or value.is_neg():
        return "a tensor that is quantized, or conjugated or negated only when it is read"
    return ""


def hooks_of(param: Tensor) -> int:
    kinds = (param._backward_hooks, getattr(param, "_post_accumulate_grad_hooks", None))
    return sum(len(hooks) for hooks in kinds if hooks)


def form_of(param: Tensor) -> str:
    """All of a parameter but its values, as text."""
    kind = str(param.dtype).removeprefix("torch.")
    hooks = hooks_of(param)
    return (
        f"{kind} of shape {tuple(param.shape)} on {param.device}"
        f"{'' if param.requires_grad else ', without gradient'}"
        f"{f', with {hooks} hooks into the backward pass' if hooks else ''}"
    )


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Also where both hold the same NaN."""
    alike = (left.dtype, left.shape) == (right.dtype, right.shape)
    return alike and torch.equal(as_bytes(left), as_bytes(right))
