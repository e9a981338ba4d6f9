"""Matrix products on the micro-kernel (tile.py): panels of b copied close by, tiles of the output split over threads.

The output is cut into panels of two vectors of columns, and those into strips of a tile's height. Each thread takes an
equal run of tiles, down the first panel, then down the next. What a panel needs of b it copies into a narrow buffer of
its own (pack.py), which the tile reads line after line from the nearest cache. a is read where it lies, but for large
a^T b, where each number would come from another page of memory. For one strip b is read once only: there the copy would
cost more than it gains, and the tile reads b in place.

No sum is split over threads, and each is added in the order of k: bits depend neither on the number of threads nor on
the sizes of blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from minidl.engine.jit import VECTOR_BYTES, apart_jit, jit, parallel_jit, prange, threads

from .pack import pack_columns, pack_rows
from .product import narrow_tile, wide_tile
from .reference import __all__ as __all__
from .tile import ROWS, lanes, panel_width

LANES = VECTOR_BYTES // 4  # of float32; a vector of float64 holds half as many, and its panels fit where these do
FEW = 256  # rows: for more of them ...
DEPTH = 256  # ... a long sum is taken in pieces, so that a panel of b stays in the first-level cache
LONGEST = 1024  # ... for fewer only a longer sum is, in pieces of half this: each goes over the output once more
BLOCK = 2**17  # numbers of a that stay in the second-level cache while panels pass by
IN_PLACE = 1  # strips for which a panel of b is not copied
OFTEN = 16  # panels for which a is copied, too, where its columns are rows (tn)
GROUP = 2 * LANES // ROWS * ROWS  # rows of a that are copied side by side: whole strips (float32)
SMALL = 2**17  # multiplications: below, one thread is faster than two


@jit
def _piece(rows: int, depth: int) -> int:
    """How many k's are taken at once."""
    longest = LONGEST if rows <= FEW else DEPTH
    return depth if depth <= longest else min(longest, LONGEST // 2)


@jit
def _packed_size(rows: int, depth: int) -> int:
    """Numbers of a packed panel of b, its depth rounded up to whole vectors."""
    return (_piece(rows, depth) + LANES - 1) // LANES * LANES * 2 * LANES


@jit
def _scratch_size(rows: int, columns: int, depth: int) -> int:
    """Numbers that one thread wants: a packed panel of b, and the block of a that is packed for many panels."""
    width, piece = 2 * LANES, _piece(rows, depth)
    block = min(rows, BLOCK // max(1, piece) + width)
    packed_a = (block + GROUP - 1) // GROUP * width * piece if columns > (OFTEN - 1) * LANES else 0  # or of float64
    return _packed_size(rows, depth) + packed_a


@apart_jit
def _finish(bias: ndarray, relu: bool, out: ndarray, at: int, step: int, rows: int, column: int, width: int) -> None:
    """out[at + i step + j] [+ bias[column + j]] [max(., 0)] for i < rows, j < width, while they are in the cache"""
    lowest = out.dtype.type(0 if relu else -np.inf)
    for i in range(rows):
        for j in range(width):
            value = out[at + i * step + j]
            if bias.size:
                value += bias[column + j]
            out[at + i * step + j] = lowest if value < lowest else value


@apart_jit
def _share(
    part: int, parts: int, a: ndarray, a_row: int, a_step: int, b: ndarray, b_step: int, b_column: int, depth: int,
    bias: ndarray, relu: bool, scratch: ndarray, out: ndarray,
) -> None:  # fmt: skip
    """One thread's share of the tiles, from `first` to `last`."""
    # Numba compiles a function once more for each literal that it is called with: these are none.
    none: Any = np.int64(0)
    one: Any = np.int64(1)
    rows, columns = out.shape
    width, piece = panel_width(a), _piece(rows, depth)
    strips = (rows + ROWS - 1) // ROWS
    tiles = strips * ((columns + width - 1) // width)
    first, last = part * tiles // parts, (part + 1) * tiles // parts
    block = min(strips, max(width, BLOCK // piece // width * width) // ROWS)  # strips of a that stay in the cache
    group = width // ROWS * ROWS
    often = a_row == 1 and group > 0 and last - first >= OFTEN * strips
    vector, packed_a, packed = out.reshape(out.size), scratch[_packed_size(rows, depth) :], scratch
    for top in range(0, strips, block):
        here = min(block * ROWS, rows - top * ROWS)
        for k in range(0, depth, piece):
            deep = min(piece, depth - k)
            if often:
                for i in range(0, here, group):
                    a_at, target = (top * ROWS + i) * a_row + k * a_step, packed_a[i // group * width * deep :]
                    pack_rows(a, a_at, a_step, deep, min(group, here - i), target)
            for number in range(first // strips, (last + strips - 1) // strips):
                # This panel's strips from lo to hi are in the block, and ours.
                lo = max(top, first - number * strips)
                hi = min(top + block, strips, last - number * strips)
                if lo >= hi:
                    continue
                column = number * width
                wide = min(width, columns - column)
                b_at = k * b_step + column * b_column
                panel_of_b, panel_at, panel_step = packed, none, width
                if b_column == 1 and hi - lo <= IN_PLACE and b_at + (deep - 1) * b_step + width <= b.size:
                    panel_of_b, panel_at, panel_step = b, b_at, b_step
                elif b_column == 1:
                    pack_rows(b, b_at, b_step, deep, wide, packed)
                else:
                    pack_columns(b, b_at, b_column, deep, wide, packed)
                # The next panel begins to come while this one's last tile is computed: earlier, it would be gone again.
                soon_at, soon_step = b_at, none
                if column + width < columns and b_column == 1:
                    soon_at, soon_step = b_at + width, b_step
                elif column + width < columns and deep == depth:
                    soon_at, soon_step = b_at + width * b_column, width  # its rows lie one after the other
                finish = k + deep == depth and (relu or bias.size > 0)
                biased = wide if bias.size > 0 else none
                for strip in range(lo, hi):
                    row = strip * ROWS
                    count = min(ROWS, rows - row)
                    step = soon_step if strip == hi - 1 else none
                    panel_of_a, a_at, a_to_row, a_to_k = a, row * a_row + k * a_step, a_row, a_step
                    if often:
                        i = row - top * ROWS
                        panel_of_a, a_at = packed_a, i // group * width * deep + i % group
                        a_to_row, a_to_k = one, width
                    if wide > lanes(a):
                        wide_tile(count, wide, deep, k > 0, panel_of_a, a_at, a_to_row, a_to_k, panel_of_b, panel_at,
                                  panel_step, vector, row * columns + column, columns, finish, bias, column, biased,
                                  relu, b, soon_at, step)  # fmt: skip
                    else:
                        narrow_tile(count, wide, deep, k > 0, panel_of_a, a_at, a_to_row, a_to_k, panel_of_b, panel_at,
                                    panel_step, vector, row * columns + column, columns, finish, bias, column, biased,
                                    relu, b, soon_at, step)  # fmt: skip


@parallel_jit
def _product(
    a: ndarray, a_row: int, a_step: int, b: ndarray, b_step: int, b_column: int, depth: int,
    bias: ndarray, relu: bool, scratch: ndarray, out: ndarray,
) -> None:  # fmt: skip
    """out[m, n] = sum over k < depth of a[m a_row + k a_step] b[k b_step + n b_column]; a and b are vectors."""
    if out.size == 0:
        return
    if depth == 0:
        out[:] = 0
        _finish(bias, relu, out.reshape(out.size), depth, out.shape[1], out.shape[0], depth, out.shape[1])
        return
    each = _scratch_size(out.shape[0], out.shape[1], depth)
    parts = scratch.size // each
    if parts == 1:
        _share(parts - 1, parts, a, a_row, a_step, b, b_step, b_column, depth, bias, relu, scratch, out)
        return
    for part in prange(parts):
        own = scratch[part * each : (part + 1) * each]
        _share(np.int64(part), parts, a, a_row, a_step, b, b_step, b_column, depth, bias, relu, own, out)


@jit
def _steps(matrix: ndarray) -> tuple[int, int]:
    """From a row to the next one and from a column to the next one, in numbers."""
    one: Any = np.int64(1)  # a plain 1 would be one more literal
    return matrix.shape[1], one


@jit
def nn(a: ndarray, b: ndarray, bias: ndarray, relu: bool, scratch: ndarray, out: ndarray) -> None:
    a_row, a_step = _steps(a)
    b_step, b_column = _steps(b)
    _product(
        a.reshape(a.size), a_row, a_step, b.reshape(b.size), b_step, b_column, a.shape[1], bias, relu, scratch, out
    )


@jit
def nt(a: ndarray, b: ndarray, scratch: ndarray, out: ndarray) -> None:
    a_row, a_step = _steps(a)
    b_column, b_step = _steps(b)
    bias = scratch[:0]
    _product(a.reshape(a.size), a_row, a_step, b.reshape(b.size), b_step, b_column, a.shape[1],
             bias, bias.size > 0, scratch, out)  # fmt: skip


@jit
def tn(a: ndarray, b: ndarray, scratch: ndarray, out: ndarray) -> None:
    a_step, a_row = _steps(a)
    b_step, b_column = _steps(b)
    bias = scratch[:0]
    _product(a.reshape(a.size), a_row, a_step, b.reshape(b.size), b_step, b_column, a.shape[0],
             bias, bias.size > 0, scratch, out)  # fmt: skip


def nn_scratch(rows: int, columns: int, depth: int) -> int:
    """Numbers of scratch for out (rows, columns) and sums of `depth` products: packed panels for each thread."""
    return (threads() if rows * columns * depth >= SMALL else 1) * int(_scratch_size(rows, columns, depth))


nt_scratch = tn_scratch = nn_scratch
