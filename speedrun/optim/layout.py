"""How a parameter is read as matrices: declared by the caller, never guessed from the shape.

    weight (out, in)              nothing to declare
    conv (out, in, kh, kw)        row_dims=1: out x (in kh kw)
    experts (E, out, in)          batch_dims=1: E matrices
    fused qkv (3 D, D)            split_rows=3: three D x D matrices
    grouped-query qkv             split_rows=(D, D // 4, D // 4)
    per head, q/k/v (H K, D)      split_rows=H
    per head, output (D, H K)     split_cols=H

Equal splits give tiles that join the batch of any other tiles of their shape.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speedrun.optim.errors import OptimError

SCALES = ("spectral", "longest", "rms", "none")


def update_scale(rule: str, rows: int, cols: int) -> float:
    """Factor on an orthogonalised update of rows x cols (outputs x inputs).

    spectral: sqrt(max(1, rows/cols)), the records' rule from 8 on; learning rates carry over
    between widths. longest: sqrt(max(rows, cols)), the rule of records 4 to 7. rms: 0.2 times
    that, so that an entry moves about as far as under Adam, whose learning rates can then be used
    as they are. none: 1, as in record 3.
    """
    match rule:
        case "spectral":
            return math.sqrt(max(1.0, rows / cols))
        case "longest":
            return math.sqrt(max(rows, cols))
        case "rms":
            return 0.2 * math.sqrt(max(rows, cols))
        case "none":
            return 1.0
    raise OptimError(f"scale={rule!r} is unknown; use one of {', '.join(SCALES)}")


@dataclass(frozen=True)
class Layout:
    """One parameter as `batch` x `row_blocks` x `col_blocks` tiles of rows x cols.

    Tall tiles are stored lying down, so that an MLP's input and output matrix share a batch.
    Unequal splits cannot be tiles: then there is one tile per batch entry, with cuts inside it.
    """

    batch: int
    row_blocks: int
    rows: int
    col_blocks: int
    cols: int
    tall: bool
    row_cuts: tuple[int, ...] = ()
    col_cuts: tuple[int, ...] = ()

    @property
    def is_cut(self) -> bool:
        return bool(self.row_cuts or self.col_cuts)

    @property
    def tile_shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """Tiles, rows and columns as they lie in the work buffers."""
        rows, cols = (self.cols, self.rows) if self.tall else (self.rows, self.cols)
        return self.batch * self.row_blocks * self.col_blocks, rows, cols

    def tiles(self, tensor: Tensor) -> Tensor:
        """A view of a contiguous tensor: (batch, row_blocks, col_blocks, rows, cols)."""
        split = tensor.view(self.batch, self.row_blocks, self.rows, self.col_blocks, self.cols)
        tiles = split.permute(0, 1, 3, 2, 4)
        return tiles.mT if self.tall else tiles

    def stored_tiles(self, buffer: Tensor) -> Tensor:
        """A contiguous buffer of `stored_shape` in the shape that `tiles` returns."""
        return buffer.view(self.batch, self.row_blocks, self.col_blocks, *buffer.shape[-2:])

    def cut(self, stored: Tensor) -> list[Tensor]:
        """The matrices to orthogonalise apart: (N, rows, cols) views of stored tiles."""
        if not self.is_cut:
            return [stored]
        return [
            block
            for band in torch.split(stored, list(self.row_cuts) or self.rows, dim=1)
            for block in torch.split(band, list(self.col_cuts) or self.cols, dim=2)
        ]


def read_layout(shape: tuple[int, ...], options: Mapping[str, Any], name: str) -> Layout:
    """The layout of a parameter of this shape under its group's options, or a refusal."""
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
    row_blocks, row_cuts = _read_split(options["split_rows"], rows, "rows", name)
    col_blocks, col_cuts = _read_split(options["split_cols"], cols, "cols", name)
    rows, cols = rows // row_blocks, cols // col_blocks
    tall = rows > cols and not (row_cuts or col_cuts)
    return Layout(batch, row_blocks, rows, col_blocks, cols, tall, row_cuts, col_cuts)


def _read_split(split: Any, length: int, axis: str, name: str) -> tuple[int, tuple[int, ...]]:
    """A split as (equal blocks, unequal cuts); one of the two is trivial."""
    if isinstance(split, int):
        sizes = (length // split,) * split if split >= 1 else ()
    else:
        sizes = tuple(int(size) for size in split)
    if not sizes or min(sizes) < 1 or sum(sizes) != length:
        raise OptimError(
            f"parameter {name} has {length} {axis}, which split_{axis}={split} does not divide; "
            f"give a number of equal blocks or sizes that add up to {length}"
        )
    return (len(sizes), ()) if len(set(sizes)) == 1 else (1, sizes)
