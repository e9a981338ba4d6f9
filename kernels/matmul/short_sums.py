"""Products of short sums: the tiles of a thread from left to right, not down one pair of panels after the other."""

from __future__ import annotations

from numpy import ndarray

from minidl.engine.jit import apart_jit, helper

from .blocks import NR, PRODUCT_MR, tile_rows
from .operands import Left, Right
from .pack import pack_rows, pack_strips
from .product import product_tile, product_tile_side_by_side, tile_columns
from .tile import panel_width

SHORT_DEPTH = 64  # up to this depth, tiles are computed from left to right, not down a panel ...
SHORT_PANELS = 2**15  # ... unless the panels of b have more numbers


@helper
def panels_size(columns: int, depth: int) -> int:
    """Return the number of elements of all panels of b."""
    return (columns + NR - 1) // NR * NR * depth


@helper
def has_short_sums(rows: int, columns: int, depth: int) -> bool:
    """Return whether tiles are computed from left to right (share_of_short_sums), unless b is transposed or packed."""
    return depth <= SHORT_DEPTH and rows > depth and panels_size(columns, depth) <= SHORT_PANELS


@apart_jit
def share_of_short_sums(
    part: int, parts: int, a: Left, b: Right, depth: int, bias: ndarray, relu: bool, scratch: ndarray, out: ndarray
) -> None:
    """Compute a thread's tiles from left to right, one strip after the other, with the whole b in packed panels.

    If sums are short, writing `out` takes as long as multiplying. Down a panel, each two rows of `out` are on another
    page of memory. From left to right, a tile continues the rows of the previous one.
    """
    rows, columns = out.shape
    nr, vector = panel_width(out), out.reshape(out.size)
    strips, strip_of_a = (rows + PRODUCT_MR - 1) // PRODUCT_MR, scratch[panels_size(columns, depth) :]
    finish = relu or bias.size > 0
    for column in range(0, columns, nr):
        pack_rows(b.numbers, column, b.step, depth, min(nr, columns - column), scratch[column * depth :], nr)
    for strip in range(part * strips // parts, (part + 1) * strips // parts):
        row = strip * PRODUCT_MR
        height = min(PRODUCT_MR, rows - row)
        if a.row == 1:
            pack_strips(a, row, depth, height, strip_of_a)
        column = 0
        while column < columns:
            wide, i = tile_columns(columns - column, out), 0
            panels, biased = 1 if wide <= nr else 2, wide if bias.size > 0 else 0
            while i < height:
                high, to = tile_rows(height - i, panels), (row + i) * columns + column
                if a.row == 1:
                    product_tile_side_by_side(high, wide, depth, False, strip_of_a, i, PRODUCT_MR,
                                              scratch, column * depth, nr, nr * depth, vector, to, columns,
                                              finish, bias, column, biased, relu, scratch, 0, 0, 0, 0)  # fmt: skip
                else:
                    product_tile(high, wide, depth, False, a.numbers, (row + i) * a.row, a.row,
                                 scratch, column * depth, nr, nr * depth, vector, to, columns,
                                 finish, bias, column, biased, relu, scratch, 0, 0, 0, 0)  # fmt: skip
                i += high
            column += wide
