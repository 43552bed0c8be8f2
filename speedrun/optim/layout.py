"""How a parameter is read as matrices: declared by the caller, never guessed from the shape.

    weight (out, in)              nothing to declare
    conv (out, in, kh, kw)        row_dims=1: out x (in kh kw)
    experts (E, out, in)          batch_dims=1: E matrices
    fused qkv (3 D, D)            split_rows=3: three D x D matrices
    grouped-query qkv             split_rows=(D, D // 4, D // 4)
    per head, q/k/v (H K, D)      split_rows=H
    per head, output (D, H K)     split_cols=H

A parameter becomes one or more blocks, and a block is a grid of matrices of one shape, its tiles.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor

from speedrun.optim.errors import OptimError


def update_scale(rule: str, rows: int, cols: int) -> float:
    """Factor on an orthogonalised update of rows x cols (outputs x inputs).

    spectral: sqrt(max(1, rows/cols)), the records' rule from 8 on; learning rates carry over
    between widths. longest: sqrt(max(rows, cols)), the rule of records 4 to 7. rms: 0.2 times
    that, so that an entry moves about as far as under Adam, whose learning rates can then be used
    as they are. none: 1, as in record 3.
    """
    spectral, longest = math.sqrt(max(1.0, rows / cols)), math.sqrt(max(rows, cols))
    return {"spectral": spectral, "longest": longest, "rms": 0.2 * longest, "none": 1.0}[rule]


@dataclass(frozen=True)
class Whole:
    """The parameter as it is; with `parts`, its rows are blocks of their own beside this one."""

    shape: tuple[int, ...]
    grid: tuple[int, ...] = ()
    parts: int = 1

    def as_tiles(self, tensor: Tensor) -> Tensor:
        return tensor


@dataclass(frozen=True)
class Rows:
    """Neighbouring rows of a table: what one rank has of it."""

    start: int
    shape: tuple[int, ...]
    grid: tuple[int, ...] = ()

    def as_tiles(self, tensor: Tensor) -> Tensor:
        return tensor[self.start : self.start + self.shape[0]]


@dataclass(frozen=True)
class Matrices:
    """From (row, col) of every matrix of the batch, a grid (batch, down, across) of matrices."""

    parameter: tuple[int, int, int]  # the whole parameter as batch, rows and columns
    row: int
    col: int
    grid: tuple[int, int, int]
    shape: tuple[int, int]

    def as_tiles(self, tensor: Tensor) -> Tensor:
        """This block of a contiguous tensor of the parameter's shape: a view (*grid, *shape)."""
        (batch, down, across), (rows, cols) = self.grid, self.shape
        below, right = self.row + down * rows, self.col + across * cols
        region = tensor.view(self.parameter)[:, self.row : below, self.col : right]
        return region.view(batch, down, rows, across, cols).transpose(2, 3)


Block = Whole | Rows | Matrices  # what is updated as one: a grid of tiles, each of one shape


def read_matrices(shape: tuple[int, ...], options: Mapping[str, Any], name: str) -> list[Matrices]:
    """The blocks of a parameter of this shape under its group's options, or a refusal."""
    batch_dims, row_dims = options["batch_dims"], options["row_dims"]
    if len(shape) < 2:
        raise OptimError(
            f"parameter {name} has shape {shape}, but Muon is for matrices; give it to Adam"
        )
    if len(shape) > 2 and batch_dims is None and row_dims is None:
        raise OptimError(
            f"parameter {name} has shape {shape}; say how it is read as matrices: row_dims=1 makes "
            f"{shape[0]} x {math.prod(shape[1:])} of it, batch_dims={len(shape) - 2} makes "
            f"{math.prod(shape[:-2])} matrices of {shape[-2]} x {shape[-1]}"
        )
    batch_dims = 0 if batch_dims is None else batch_dims
    row_dims = 1 if row_dims is None else row_dims
    if batch_dims < 0 or row_dims < 1 or batch_dims + row_dims >= len(shape):
        raise OptimError(
            f"parameter {name} has shape {shape}, which batch_dims={batch_dims} and "
            f"row_dims={row_dims} do not divide into batch, rows and columns; "
            f"their sum must stay below {len(shape)}"
        )
    batch = math.prod(shape[:batch_dims])
    rows = math.prod(shape[batch_dims : batch_dims + row_dims])
    cols = math.prod(shape[batch_dims + row_dims :])
    if batch * rows * cols == 0:
        raise OptimError(f"parameter {name} has shape {shape} and thus no entries; leave it out")
    return [
        Matrices((batch, rows, cols), row, col, (batch, down, across), (height, width))
        for row, down, height in _read_split(options["split_rows"], rows, "rows", name)
        for col, across, width in _read_split(options["split_cols"], cols, "cols", name)
    ]


def _read_split(split: Any, length: int, axis: str, name: str) -> list[tuple[int, int, int]]:
    """A split as runs of equal sizes: (start, how many, size)."""
    sizes = (length // max(split, 1),) * split if isinstance(split, int) else split
    if not sizes or min(sizes) < 1 or sum(sizes) != length:
        raise OptimError(
            f"parameter {name} has {length} {axis}, which split_{axis}={split} does not divide; "
            f"give a number of equal blocks or sizes that add up to {length}"
        )
    runs, start = [], 0
    for size, equal in groupby(sizes):
        count = len(list(equal))
        runs.append((start, count, size))
        start += count * size
    return runs
