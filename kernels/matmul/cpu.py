"""Matrix products on the micro-kernel (tile.py): b packed panel by panel, the tiles of the output split over threads.

The output is cut into panels of two vectors of columns, and those into rows of tiles. Each thread takes an equal run of
tiles, panel after panel. It copies what a panel needs of b into a narrow buffer of its own, (K, two vectors), so that
the tile reads it from the nearest cache, one line after the other; a is read where it lies.

No sum is split over threads, and each is added in the order of k: the bits depend neither on the number of threads
nor on the sizes of blocks.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.jit import VECTOR_BYTES, jit, parallel_jit, prange, threads

from .reference import __all__ as __all__
from .tile import ROWS, panel, panel_width

WIDTH = 2 * VECTOR_BYTES // 4  # columns of a panel of float32; of float64 it has half as many
DEPTH = 1024  # k's in one packed panel: longer sums are taken in pieces
BLOCK = 2**17  # numbers of a that stay in the second-level cache while the panels pass by
SMALL = 2**17  # multiplications: below, one thread is faster than two


@jit
def _pack(b: ndarray, at: int, step: int, column: int, depth: int, width: int, packed: ndarray) -> None:
    """packed (depth, panel width), with zeros beyond `width`: element (k, j) of b is b[at + k step + j column]"""
    columns = packed.size // depth
    for k in range(depth):
        row = packed[k * columns : (k + 1) * columns]
        for j in range(width):
            row[j] = b[at + k * step + j * column]
        row[width:] = 0


@jit
def _finish(bias: ndarray, relu: bool, rows: ndarray) -> None:
    """rows (any, width) [+ bias (width,)] [max(., 0)], while they are in the cache"""
    for i in range(rows.shape[0]):
        row = rows[i]
        if bias.size:
            for j in range(row.size):
                row[j] += bias[j]
        if relu:
            for j in range(row.size):
                row[j] = row.dtype.type(0) if row[j] < 0 else row[j]


@jit
def _part(
    part: int, parts: int, a: ndarray, a_row: int, a_step: int, b: ndarray, b_step: int, b_column: int, depth: int,
    bias: ndarray, relu: bool, scratch: ndarray, out: ndarray,
) -> None:  # fmt: skip
    """One thread's share: tiles `first` to `last`, counted down the first panel, then down the next one."""
    rows, columns = out.shape
    width = panel_width(a)
    strips = (rows + ROWS - 1) // ROWS
    tiles = strips * ((columns + width - 1) // width)
    first, last = part * tiles // parts, (part + 1) * tiles // parts
    vector = out.reshape(out.size)
    block = max(1, BLOCK // min(depth, DEPTH) // ROWS)  # strips
    nothing = np.zeros(1, np.int64)
    a_rows, out_rows = np.arange(block * ROWS) * a_row, np.arange(block * ROWS) * columns
    for top in range(0, strips, block):
        for k in range(0, depth, DEPTH):
            deep = min(DEPTH, depth - k)
            packed = scratch[: deep * width]
            for number in range(first // strips, (last + strips - 1) // strips):
                lo = max(top, first - number * strips)
                hi = min(top + block, strips, last - number * strips)
                if lo >= hi:
                    continue
                row, count = lo * ROWS, min(hi * ROWS, rows) - lo * ROWS
                column = number * width
                wide = min(width, columns - column)
                _pack(b, k * b_step + column * b_column, b_step, b_column, deep, wide, packed)
                panel(count, 1, deep, k > 0, a, nothing, a_rows[:count], row * a_row + k * a_step, a_step,
                      packed, nothing, 0, width,
                      vector, out_rows[:count], row * columns + column, wide)  # fmt: skip
                if k + deep == depth and (relu or bias.size):
                    _finish(bias[column : column + wide], relu, out[row : row + count, column : column + wide])


@parallel_jit
def _product(
    a: ndarray, a_row: int, a_step: int, b: ndarray, b_step: int, b_column: int, depth: int,
    bias: ndarray, relu: bool, scratch: ndarray, out: ndarray,
) -> None:  # fmt: skip
    """out[m, n] = sum over k < depth of a[m a_row + k a_step] b[k b_step + n b_column]; a and b are vectors."""
    if depth == 0:
        out[:] = 0
        _finish(bias, relu, out)
        return
    own = min(depth, DEPTH) * WIDTH
    parts = scratch.size // own
    if parts == 1:
        _part(0, 1, a, a_row, a_step, b, b_step, b_column, depth, bias, relu, scratch, out)
        return
    for part in prange(parts):
        _part(part, parts, a, a_row, a_step, b, b_step, b_column, depth, bias, relu,
              scratch[part * own : (part + 1) * own], out)  # fmt: skip


@jit
def nn(a: ndarray, b: ndarray, bias: ndarray, relu: bool, scratch: ndarray, out: ndarray) -> None:
    depth, columns = b.shape
    _product(a.reshape(a.size), depth, 1, b.reshape(b.size), columns, 1, depth, bias, relu, scratch, out)


@jit
def nt(a: ndarray, b: ndarray, scratch: ndarray, out: ndarray) -> None:
    depth = b.shape[1]
    no_bias = np.empty(0, out.dtype)
    _product(a.reshape(a.size), depth, 1, b.reshape(b.size), 1, depth, depth, no_bias, False, scratch, out)


@jit
def tn(a: ndarray, b: ndarray, scratch: ndarray, out: ndarray) -> None:
    depth, columns = b.shape
    no_bias = np.empty(0, out.dtype)
    _product(a.reshape(a.size), 1, out.shape[0], b.reshape(b.size), columns, 1, depth, no_bias, False, scratch, out)


def nn_scratch(rows: int, columns: int, depth: int) -> int:
    """Numbers of scratch that nn wants for out (rows, columns): a packed panel for each thread that is to work."""
    return (threads() if rows * columns * depth >= SMALL else 1) * min(depth, DEPTH) * WIDTH


nt_scratch = tn_scratch = nn_scratch
