"""Blocks and tiles: every number of a parameter is in one tile, and where it belongs."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speedrun.optim.layout import Whole, read_matrices

PLAIN: dict[str, Any] = {"batch_dims": None, "row_dims": None, "split_rows": 1, "split_cols": 1}


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[int], Any]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    equal = len(set(sizes)) == 1 and draw(st.booleans())
    return sizes, len(sizes) if equal else tuple(sizes)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), splits(), splits())
def test_tiles_are_the_pieces_of_the_split(batch: int, rows: Any, cols: Any) -> None:
    (heights, split_rows), (widths, split_cols) = rows, cols
    shape = (batch, sum(heights), sum(widths))
    options = {**PLAIN, "batch_dims": 1, "split_rows": split_rows, "split_cols": split_cols}
    numbers = torch.arange(batch * shape[1] * shape[2]).view(shape)
    expected = [
        piece
        for matrix in numbers
        for band in torch.split(matrix, heights)
        for piece in torch.split(band, widths, dim=1)
    ]
    found = [
        tile
        for block in read_matrices(shape, options, "w")
        for tile in block.as_tiles(numbers).reshape(-1, *block.shape)
    ]
    assert sorted(tile.tolist() for tile in found) == sorted(tile.tolist() for tile in expected)


def test_tiles_are_views_that_write_through() -> None:
    tensor = torch.zeros(6, 4)
    [block] = read_matrices((6, 4), {**PLAIN, "split_rows": 3, "split_cols": 2}, "w")
    assert (block.grid, block.shape) == ((1, 3, 2), (2, 2))
    block.as_tiles(tensor)[0, 2, 1] = 1.0
    assert torch.equal(tensor.nonzero(), torch.tensor([[4, 2], [4, 3], [5, 2], [5, 3]]))
    assert Whole((6, 4)).as_tiles(tensor) is tensor


@pytest.mark.parametrize(
    ("sizes", "grids"),
    [((8, 2, 2), [(1, 1, 1), (1, 2, 1)]), ((4, 4, 4), [(1, 3, 1)]), ((2, 8, 2), [(1, 1, 1)] * 3)],
)
def test_neighbours_of_one_size_are_one_block(
    sizes: tuple[int, ...], grids: list[tuple[int, ...]]
) -> None:
    blocks = read_matrices((12, 5), {**PLAIN, "split_rows": sizes}, "w")
    assert [block.grid for block in blocks] == grids
