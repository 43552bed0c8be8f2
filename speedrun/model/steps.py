"""A computation on vectors as a list of steps, which native/decode.cpp runs.

The list is made once and names places in memory; `Steps` has a method for each kind of step and
checks there that what is named has the size that the step works on.

Shapes: S slots, G key/value heads, T time, K head dim.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from speedrun.model import native
from speedrun.model.cache import LayerCache
from speedrun.model.embeddings import Table
from speedrun.model.linear import Linear, Norm
from speedrun.model.rotary import Rotary

# The kinds of steps, and by which number of a token a table is read, both as decode.cpp counts.
ADD_ROW, MIX, NORM, TURN, PRODUCT, RELU_SQUARED, GELU, SOFTCAP, OFFSET, REMEMBER, ATTEND = range(11)
ID, PAIR, POSITION = range(3)


class Step(ctypes.Structure):
    """struct Step of decode.cpp: to = f(x, y, z)."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("to", "x", "y", "z")),
        *((name, ctypes.c_int64) for name in ("next_to", "next_x", "next_y", "next_z")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "stride", "group")),
        *((name, ctypes.c_float) for name in ("a", "b")),
    )


def require(holds: bool, what: str) -> None:
    """A check that stays where Python runs without asserts: C++ believes what it is told."""
    if not holds:
        raise ValueError(what)


class PackedWeights:
    """A model's matrices in the order in which products read them; decoders may share them."""

    def __init__(self, kernel: native.Kernel) -> None:
        self._kernel = kernel
        self._packed: dict[tuple[int, ...], Tensor] = {}

    def of(self, matrices: Sequence[Tensor]) -> Tensor:
        """Some matrices below each other."""
        key = tuple(matrix.data_ptr() for matrix in matrices)
        if key not in self._packed:
            matrix = torch.cat([*matrices]).detach()
            rows, columns = matrix.shape
            vectors = -(-rows // self._kernel.lanes)
            packed = torch.zeros(vectors * self._kernel.lanes * columns)
            require(matrix.is_contiguous() and matrix.dtype == torch.float32, "plain matrices")
            self._kernel.invoke("pack_rows", [matrix, rows, columns, packed])
            self._packed[key] = packed
        return self._packed[key]


class Steps:
    """A list of steps, and the tensors whose places they name.

    A vector of the computation is a tensor (S, n): every slot has its own. Weights are for all.
    """

    def __init__(self, weights: PackedWeights, slots: int = 1) -> None:
        self._weights, self.slots = weights, slots
        self.steps: list[Step] = []
        self.tensors: list[Tensor] = []  # held here, for a place is good as long as its tensor

    def _add(
        self,
        kind: int,
        own: Mapping[str, Tensor],
        shared: Mapping[str, Tensor | None] | None = None,
        **numbers: float,
    ) -> None:
        """`own`: places of which each slot has one; `shared`: weights and tables."""
        step = Step(kind=kind, **numbers)
        for name, tensor in own.items():
            require(len(tensor) == self.slots, "one for each slot")
            require(tensor[0].is_contiguous(), "steps know no strides but that between slots")
            setattr(step, f"next_{name}", tensor.stride(0))
            self._place(step, name, tensor)
        for name, weight in (shared or {}).items():
            if weight is not None:
                require(weight.is_contiguous(), "steps know no strides")
                self._place(step, name, weight)
        self.steps.append(step)

    def _place(self, step: Step, name: str, tensor: Tensor) -> None:
        require(tensor.dtype == torch.float32, "steps compute in fp32")
        require(tensor.device.type == "cpu", "steps compute on the CPU")
        self.tensors.append(tensor.detach())
        setattr(step, name, tensor.data_ptr())

    def vector(self, size: int) -> Tensor:
        return torch.zeros(self.slots, size)

    def row(self, to: Tensor, table: Table, by: int, *, add: bool = False) -> Tensor:
        """to (+)= the token's row of a table."""
        require(table.weight.size(1) == to.size(1), "a row of a table is a vector")
        shared = {"y": table.weight}
        self._add(ADD_ROW, {"to": to}, shared, columns=to.size(1), group=by, a=float(add))
        return to

    def mix(self, to: Tensor, a: float, x: Tensor, b: float, y: Tensor) -> Tensor:
        """to = a x + b y"""
        require(to.shape == x.shape == y.shape, "one size of vectors")
        self._add(MIX, {"to": to, "x": x, "y": y}, columns=to.size(1), a=a, b=b)
        return to

    def rms_norm(self, to: Tensor, x: Tensor, columns: int, eps: float) -> Tensor:
        """Each `columns` numbers over their root mean square."""
        require(to.shape == x.shape and x.size(1) % columns == 0, "whole rows")
        rows = x.size(1) // columns
        self._add(NORM, {"to": to, "x": x}, rows=rows, columns=columns, a=eps)
        return to

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        to, shared = torch.zeros_like(x), {"y": norm.gain, "z": norm.bias}
        for weight in shared.values():
            require(weight is None or weight.numel() == x.size(1), "a gain for each number")
        self._add(NORM, {"to": to, "x": x}, shared, rows=1, columns=x.size(1), a=norm.eps)
        return to

    def rotate(self, x: Tensor, rotary: Rotary, head_dim: int) -> None:
        """x turned as its position asks, in place."""
        require(2 * rotary.cos.size(1) == head_dim, "an angle for each pair")
        require(rotary.cos.shape == rotary.sin.shape, "a sine for each cosine")
        shared = {"y": rotary.cos, "z": rotary.sin}
        self._add(TURN, {"to": x}, shared, rows=x.size(1) // head_dim, columns=head_dim)

    def product(
        self, x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> Tensor:
        """matrix x + bias, of several matrices one after the other."""
        to = self.vector(sum(map(len, matrices)))
        self._product(to, x, matrices, biases, b=1.0)
        return to

    def add_product(self, to: Tensor, factor: float, x: Tensor, linear: Linear) -> None:
        """to += factor linear(x)"""
        self._product(to, x, [linear.weight], [linear.bias], a=1.0, b=factor)

    def _product(
        self,
        to: Tensor,
        x: Tensor,
        matrices: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        **factors: float,
    ) -> None:
        added = [bias for bias in biases if bias is not None]
        require(len(added) in (0, len(matrices)), "all of them have a bias, or none")
        require(sum(map(len, matrices)) == to.size(1), "a row of a matrix for each result")
        require(all(each.size(1) == x.size(1) for each in matrices), "a column for each input")
        require(not added or sum(map(len, added)) == to.size(1), "a bias for each result")
        shared = {"y": self._weights.of(matrices), "z": torch.cat(added) if added else None}
        sizes = {"rows": to.size(1), "columns": x.size(1)}
        self._add(PRODUCT, {"to": to, "x": x}, shared, **sizes, **factors)

    def activate(self, x: Tensor, *, gelu: bool) -> Tensor:
        self._add(GELU if gelu else RELU_SQUARED, {"to": x, "x": x}, columns=x.size(1))
        return x

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        if cap:
            self._add(SOFTCAP, {"to": x, "x": x}, columns=x.size(1), a=cap)
        return x

    def offset_keys(self, k: Tensor, cache: LayerCache) -> None:
        """The unrotated half of each key from the token before, in place."""
        G, K = cache.last_key.size(1), cache.last_key.size(3)
        require(k.size(1) == G * K and K % 4 == 0, "the last key is as large, in quarters")
        self._add(OFFSET, {"to": k, "y": cache.last_key}, rows=G, columns=K)

    def remember(self, cached: Tensor, x: Tensor) -> None:
        """Keys or values of the token to their place in the cache."""
        _, G, T, K = cached.shape
        require(x.size(1) == G * K, "a place for each key")
        self._add(REMEMBER, {"to": cached, "x": x}, rows=G, columns=K, stride=T * K)

    def attend(self, q: Tensor, cache: LayerCache, scale: float) -> Tensor:
        _, G, T, K = cache.keys.shape
        H, to = q.size(1) // K, self.vector(q.size(1))
        require(q.size(1) == H * K and H % G == 0, "query heads share key heads evenly")
        require(cache.keys.shape == cache.values.shape, "a value for each key")
        places = {"to": to, "x": q, "y": cache.keys, "z": cache.values}
        sizes = {"rows": H, "columns": K, "stride": T * K, "group": H // G}
        self._add(ATTEND, places, {}, **sizes, a=scale)
        return to
