"""Matrix products on the micro-kernel (product.py): packed panels of b, and tiles of the output divided among threads.

The output is divided into panels of NR columns, and each panel into strips of MR rows. A strip of a panel is a tile
(blocks.py contains the sizes). Each thread computes an equal number of successive tiles, down one panel, then down the
next. It copies the part of b that a panel needs into its own small buffer (pack.py). The tiles read this buffer as
contiguous memory from the nearest cache. A thread that computes only one strip of a panel reads b in place, unless b is
transposed: a copy would cost more than it gains. Products of few rows use wider tiles (few.py). a is read in place,
except in a^T @ b with many panels per thread: there, the numbers of a for successive k are often on different pages of
memory.

Each sum is computed by a single thread: it sums pieces of KC products in the order of k, and adds the pieces up. KC
depends only on the shape of the product, so bits do not depend on the number of threads.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import apart_jit, jit, parallel_jit, prange, threads

from .blocks import LANES, MC_KC, MOST_FEW, NR, PRODUCT_MR, block_depth, block_rows, few_panels, few_rows
from .few import few_tile
from .pack import pack_columns, pack_rows, prefetch_rows
from .product import product_tile, product_tile_side_by_side
from .reference import __all__ as __all__
from .tile import panel_width

B_IN_PLACE_STRIPS = 6
PACK_A_PANELS = 4  # a thread with at least this many panels copies a, too
SHORT_DEPTH = 64  # up to this depth, tiles are computed from left to right, not down a panel ...
SHORT_PANELS = 2**15  # ... unless b has more numbers
SERIAL_BELOW = 2**17  # for fewer multiplications, one thread is faster than two
# One core reads a b of 1 MB in 16 us (measured: Zen 4). For a smaller one, a second core saves no time.
FEW_SERIAL_BELOW = 2**18  # one thread computes `nn` of few rows if b has fewer numbers


@jit
def _packed_size(depth: int) -> int:
    """Return the number of elements of a packed panel of b, whose depth is rounded up to whole vectors."""
    return (block_depth(max(1, depth)) + LANES - 1) // LANES * LANES * NR


@jit
def _panels_size(columns: int, depth: int) -> int:
    """Return the number of elements of all panels of b."""
    return (columns + NR - 1) // NR * NR * depth


@jit
def _has_short_sums(rows: int, columns: int, depth: int) -> bool:
    return depth <= SHORT_DEPTH and rows > depth and _panels_size(columns, depth) <= SHORT_PANELS


@jit
def _scratch_size(rows: int, columns: int, depth: int) -> int:
    """Return the number of elements of a thread's scratch: a panel of b and, for many panels, a block of a."""
    kc = block_depth(max(1, depth))
    mc = min(rows, MC_KC // kc + NR)
    if _has_short_sums(rows, columns, depth):
        return max(_packed_size(depth), _panels_size(columns, depth)) + (PRODUCT_MR + 1) * (depth + LANES)
    # LANES, not NR: a panel of float64 is half as wide, so PACK_A_PANELS panels have half as many columns.
    strips = (mc + PRODUCT_MR - 1) // PRODUCT_MR if columns > (PACK_A_PANELS - 1) * LANES else 1
    packed_a = strips * PRODUCT_MR * kc + LANES * (PRODUCT_MR + 1)
    return _packed_size(depth) + (packed_a + LANES - 1) // LANES * LANES


@apart_jit
def _pack_strips(a: ndarray, at: int, row: int, step: int, depth: int, rows: int, packed: ndarray) -> None:
    """Copy strips of PRODUCT_MR rows of a: packed[first * depth + k * PRODUCT_MR + i] = a[at + (first + i) * row
    + k * step], for each strip, which begins with row `first`. Missing rows of the last strip get any value."""
    for first in range(0, rows, PRODUCT_MR):
        some, strip = min(PRODUCT_MR, rows - first), packed[first * depth :]
        if row > 1:
            pack_columns(a, at + first * row, row, depth, some, strip, PRODUCT_MR)
        else:
            pack_rows(a, at + first, step, depth, some, strip, PRODUCT_MR)


@apart_jit
def _empty_sums(bias: ndarray, relu: bool, out: ndarray) -> None:
    """Compute the output for depth 0: the sums have no products, so only bias and relu remain."""
    for m in range(out.shape[0]):
        for n in range(out.shape[1]):
            total = out.dtype.type(0)
            if bias.size:
                total += bias[n]
            out[m, n] = 0 if relu and total < 0 else total


@apart_jit
def _share(
    part: int, parts: int, a: ndarray, a_row: int, a_step: int, b: ndarray, b_panel: int, b_step: int, b_column: int,
    depth: int, bias: ndarray, relu: bool, scratch: ndarray, out: ndarray,
) -> None:  # fmt: skip
    """Compute the tiles of one thread. b_panel: the distance between panels of b (see _product for the others)."""
    rows, columns = out.shape
    nr, kc = panel_width(a), block_depth(depth)
    strips = (rows + PRODUCT_MR - 1) // PRODUCT_MR
    tiles = strips * ((columns + nr - 1) // nr)
    first, last = part * tiles // parts, (part + 1) * tiles // parts
    block = min(strips, block_rows(kc, nr) // PRODUCT_MR)  # strips in a block of a
    pack_a = last - first >= PACK_A_PANELS * strips and not _has_short_sums(rows, columns, depth)
    vector, packed_a, packed = out.reshape(out.size), scratch[_packed_size(depth) :], scratch
    is_packed = b_panel != nr * b_column  # b consists of packed panels
    few_mr = few_rows(rows, not is_packed) if b_column == 1 else 0
    few = few_panels(few_mr)  # panels that few.py computes together
    for top in range(0, strips, block):  # blocks of MC rows ...
        here = min(block * PRODUCT_MR, rows - top * PRODUCT_MR)
        for k in range(0, depth, kc):  # ... and KC products
            deep = min(kc, depth - k)
            if pack_a and not few:
                _pack_strips(a, top * PRODUCT_MR * a_row + k * a_step, a_row, a_step, deep, here, packed_a)
            finish = k + deep == depth and (relu or bias.size > 0)
            done = 0
            for number in range(first // strips, (last + strips - 1) // strips):  # panels of NR columns
                if number < done:
                    continue
                if few and number + few <= last and (number + few) * nr <= columns:
                    done, column = number + few, number * nr
                    for row in range(0, rows, few_mr):
                        few_tile(min(few_mr, rows - row), deep, k > 0, a, row * a_row + k * a_step, a_row, a_step,
                                 b, k * b_step + number * b_panel, b_step, b_panel,
                                 vector, row * columns + column, columns,
                                 finish, bias, column, few * nr if bias.size > 0 else 0, relu)  # fmt: skip
                    continue
                # The panel's strips lo, ..., hi - 1 are in the block, and this thread computes them.
                lo = max(top, first - number * strips)
                hi = min(top + block, strips, last - number * strips)
                if lo >= hi:
                    continue
                column = number * nr
                wide = min(nr, columns - column)
                b_at = k * b_step + number * b_panel
                panel_of_b, panel_at, panel_step = packed, 0, nr
                in_place = is_packed or (b_column == 1 and hi - lo <= B_IN_PLACE_STRIPS)
                if in_place and b_at + (deep - 1) * b_step + nr <= b.size:
                    panel_of_b, panel_at, panel_step = b, b_at, b_step
                elif b_column == 1:
                    pack_rows(b, b_at, b_step, deep, wide, packed, nr)
                else:
                    pack_columns(b, b_at, b_column, deep, wide, packed, nr)
                soon_at, soon_step = 0, 0  # the rows of the next panel
                if column + nr < columns and b_column == 1 and not is_packed:
                    soon_at, soon_step = b_at + b_panel, b_step
                elif column + nr < columns and deep == depth and not is_packed:
                    soon_at, soon_step = b_at + b_panel, nr  # transposed: nr whole rows of b, contiguous
                biased = wide if bias.size > 0 else 0
                for strip in range(lo, hi):  # strips of PRODUCT_MR rows
                    row = strip * PRODUCT_MR
                    height, c_at = min(PRODUCT_MR, rows - row), row * columns + column
                    if soon_step > 0:  # each tile prefetches its share of the next panel
                        begin, end = (strip - lo) * deep // (hi - lo), (strip - lo + 1) * deep // (hi - lo)
                        prefetch_rows(b, soon_at + begin * soon_step, soon_step, end - begin)
                    if pack_a and not few:
                        a_at = (row - top * PRODUCT_MR) * deep
                        product_tile_side_by_side(height, wide, deep, k > 0, packed_a, a_at, PRODUCT_MR,
                                                  panel_of_b, panel_at, panel_step, vector, c_at, columns,
                                                  finish, bias, column, biased, relu)  # fmt: skip
                    elif a_row == 1:
                        strip_of_a, a_at, a_to_k = a, row + k * a_step, a_step
                        if a_at + (deep - 1) * a_step + PRODUCT_MR > a.size:  # the tile would read beyond a
                            _pack_strips(a, a_at, 1, a_step, deep, height, packed_a)
                            strip_of_a, a_at, a_to_k = packed_a, 0, PRODUCT_MR
                        product_tile_side_by_side(height, wide, deep, k > 0, strip_of_a, a_at, a_to_k,
                                                  panel_of_b, panel_at, panel_step, vector, c_at, columns,
                                                  finish, bias, column, biased, relu)  # fmt: skip
                    else:
                        product_tile(height, wide, deep, k > 0, a, row * a_row + k, a_row,
                                     panel_of_b, panel_at, panel_step, vector, c_at, columns,
                                     finish, bias, column, biased, relu)  # fmt: skip


@apart_jit
def _share_of_short_sums(
    part: int, parts: int, a: ndarray, a_row: int, a_step: int, b: ndarray, b_step: int, depth: int,
    bias: ndarray, relu: bool, scratch: ndarray, out: ndarray,
) -> None:  # fmt: skip
    """Compute a thread's tiles from left to right, one strip after the other, with the whole b in packed panels.

    If sums are short, writing `out` takes as long as multiplying. Down a panel, each two rows of `out` are on another
    page of memory. From left to right, a tile continues the rows of the previous one.
    """
    rows, columns = out.shape
    nr, vector = panel_width(a), out.reshape(out.size)
    strips, packed_a = (rows + PRODUCT_MR - 1) // PRODUCT_MR, scratch[_panels_size(columns, depth) :]
    for column in range(0, columns, nr):
        pack_rows(b, column, b_step, depth, min(nr, columns - column), scratch[column * depth :], nr)
    for strip in range(part * strips // parts, (part + 1) * strips // parts):
        row = strip * PRODUCT_MR
        height = min(PRODUCT_MR, rows - row)
        _pack_strips(a, row * a_row, a_row, a_step, depth, height, packed_a)
        for column in range(0, columns, nr):
            wide = min(nr, columns - column)
            product_tile_side_by_side(height, wide, depth, False, packed_a, 0, PRODUCT_MR,
                                      scratch, column * depth, nr, vector, row * columns + column, columns,
                                      relu or bias.size > 0, bias, column, wide if bias.size > 0 else 0,
                                      relu)  # fmt: skip


@apart_jit
def _pack_all(b: ndarray, b_step: int, depth: int, columns: int, packed: ndarray) -> None:
    """Pack all panels of b, unless `packed` contains them. It is 0 beyond the last column."""
    nr = panel_width(b)
    if packed[packed.size - 1] != 0:
        return
    packed[:] = 0
    for column in range(0, columns, nr):
        pack_rows(b, column, b_step, depth, min(nr, columns - column), packed[column * depth :], nr)
    packed[packed.size - 1] = 1


@parallel_jit
def _product(
    a: ndarray, a_row: int, a_step: int, b: ndarray, b_step: int, b_column: int, depth: int,
    bias: ndarray, relu: bool, packed: ndarray, scratch: ndarray, out: ndarray,
) -> None:  # fmt: skip
    """out[m, n] = sum over k < depth of a[m * a_row + k * a_step] * b[k * b_step + n * b_column]; a, b: vectors

    packed: see reference.py. Its panels (depth, panel width) contain the whole b.
    """
    if out.size == 0:
        return
    if depth == 0:
        _empty_sums(bias, relu, out)
        return
    each = _scratch_size(out.shape[0], out.shape[1], depth)
    parts = scratch.size // each
    short = b_column == 1 and packed.size == 0 and _has_short_sums(out.shape[0], out.shape[1], depth)
    b_panel = panel_width(a) * b_column
    if packed.size > 0:
        _pack_all(b, b_step, depth, out.shape[1], packed)
        b, b_panel, b_step = packed, panel_width(a) * depth, panel_width(a)
    if parts == 1:
        if short:
            _share_of_short_sums(0, 1, a, a_row, a_step, b, b_step, depth, bias, relu, scratch, out)
        else:
            _share(0, 1, a, a_row, a_step, b, b_panel, b_step, b_column, depth, bias, relu, scratch, out)
        return
    for part in prange(parts):
        own, number = scratch[part * each : (part + 1) * each], np.int64(part)
        # np.int64: the index of a prange loop is unsigned; with signed integers, Numba would compute in float64.
        if short:
            _share_of_short_sums(number, parts, a, a_row, a_step, b, b_step, depth, bias, relu, own, out)
        else:
            _share(number, parts, a, a_row, a_step, b, b_panel, b_step, b_column, depth, bias, relu, own,
                   out)  # fmt: skip


@jit
def nn(
    a: ndarray, b: ndarray, bias: ndarray, relu: bool, packed: ndarray, scratch: ndarray, out: ndarray
) -> None:
    """Compute out (M, N) = a (M, K) @ b (K, N), plus bias (N,) unless its size is 0; then apply relu if `relu`.

    packed: of size 0, or packed_size(N, K) numbers, see reference.py; scratch: nn_scratch(M, N, K) numbers
    """
    k, n = b.shape
    _product(a.reshape(a.size), k, 1, b.reshape(b.size), n, 1, k, bias, relu, packed, scratch, out)


@jit
def nt(a: ndarray, b: ndarray, scratch: ndarray, out: ndarray) -> None:
    """out (M, N) = a (M, K) @ b (N, K)^T"""
    k = b.shape[1]
    _product(a.reshape(a.size), k, 1, b.reshape(b.size), 1, k, k, scratch[:0], False, scratch[:0], scratch, out)


@jit
def tn(a: ndarray, b: ndarray, scratch: ndarray, out: ndarray) -> None:
    """out (M, N) = a (K, M)^T @ b (K, N)"""
    (k, m), n = a.shape, b.shape[1]
    _product(a.reshape(a.size), 1, m, b.reshape(b.size), n, 1, k, scratch[:0], False, scratch[:0], scratch, out)


def nn_scratch(rows: int, columns: int, depth: int) -> int:
    """Return the number of elements of scratch, for out (rows, columns) and sums of `depth` products."""
    if rows <= MOST_FEW and columns * depth < FEW_SERIAL_BELOW:
        return int(_scratch_size(rows, columns, depth))
    return nt_scratch(rows, columns, depth)


def packed_size(columns: int, depth: int) -> int:
    """Return the number of elements of nn's `packed`: all panels of b, and whether they are there."""
    return int(_panels_size(columns, depth)) + 1


def nt_scratch(rows: int, columns: int, depth: int) -> int:
    return (threads() if rows * columns * depth >= SERIAL_BELOW else 1) * int(_scratch_size(rows, columns, depth))


tn_scratch = nt_scratch
