"""Matrix products on the micro-kernel (product.py): packed panels of b, and tiles of the output divided among threads.

The output is divided into pairs of panels of NR columns, and each pair into strips of PRODUCT_MR rows. A strip of a
pair is one or two tiles (blocks.py contains the sizes; with 16 registers, a "pair" is a single panel). Each thread
computes an equal number of successive strips, down one pair, then down the next or, if the output is higher than wide,
an equal number of rows of all pairs (_divides_rows). It copies what its tiles need into its own small buffers: a block
of a, as strips (pack.py), and the panels of b. The first tile of a pair copies its panels while it multiplies
(product.py), unless b is transposed or the pair is not full (pack.py). The tiles read these buffers as contiguous
memory from the nearest caches. Some copies would cost more than they gain:

- a is read in place unless it is transposed, and a thread computes many panels or its sums are short: a tile reads
  only 6 rows at a time;
- b is read in place if a thread computes a single strip of a pair, unless b is transposed;
- b need not be copied if an earlier call has packed it: the weights of a prediction (reference.py, `packed`).

Two kinds of products have tiles in another order or of another form: those of short sums (short_sums.py), and
those of few rows (few.py).

Each sum is computed by a single thread: it sums pieces of KC products in the order of k, and adds the pieces up. KC
depends only on the depth. So bits depend neither on the number of threads nor on the number of rows and columns. Large
products of float32 numbers are computed on AMX, if the CPU has it (amx_product.py): their last bits differ.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy import ndarray

from minidl.engine.jit import HAS_AMX, apart_jit, helper, jit, parallel_jit, prange, threads
from minidl.engine.team import thread_count

from .amx import parts_size
from .amx_product import amx_product, memory_of_thread, uses_amx
from .blocks import (
    LANES,
    LINE,
    MC_KC,
    MOST_FEW,
    NR,
    PANELS,
    PRODUCT_MR,
    block_depth,
    block_rows,
    few_panels,
    few_rows,
    tile_rows,
)
from .few import few_tile
from .operands import Left, Right
from .pack import pack_columns, pack_rows, pack_strips
from .product import (
    LINES,
    packing_tile,
    packing_tile_side_by_side,
    product_tile,
    product_tile_side_by_side,
)
from .reference import __all__ as __all__
from .short_sums import has_short_sums, panels_size, share_of_short_sums
from .tile import lanes, line_of, panel_width, whole_vectors

B_IN_PLACE_STRIPS = 1  # for up to this many strips panels of b are not copied, unless b is transposed
PACK_A_PANELS = 4  # a thread with at least this many panels copies a, too, if a is transposed
SERIAL_BELOW = 2**17  # for fewer multiplications, one thread is faster than two
# One core reads a b of 1 MB in 16 us (measured: Zen 4). For a smaller one, a second core saves no time.
FEW_SERIAL_BELOW = 2**18  # one thread computes `nn` of few rows if b has fewer numbers


class End(NamedTuple):
    """What follows the sums: if `finish`, the bias is added unless its size is 0, then relu is applied if `relu`."""

    finish: bool
    bias: ndarray
    relu: bool


@helper
def _packed_size(depth: int) -> int:
    """Return the number of elements of a packed panel of b, whose depth is rounded up to whole vectors."""
    return (block_depth(max(1, depth)) + LANES - 1) // LANES * LANES * NR


@helper
def _scratch_size(rows: int, columns: int, depth: int) -> int:
    """Return the number of elements of a thread's scratch: panels of b and, for many panels, a block of a."""
    kc = block_depth(max(1, depth))
    mc = min(rows, MC_KC // kc + NR)
    if has_short_sums(rows, columns, depth):
        return max(PANELS * _packed_size(depth), panels_size(columns, depth)) + (PRODUCT_MR + 1) * (depth + LANES)
    # LANES, not NR: a panel of float64 is half as wide, so PACK_A_PANELS panels have half as many columns. The last
    # pair may have few columns.
    strips = (mc + PRODUCT_MR - 1) // PRODUCT_MR if columns > (PACK_A_PANELS - PANELS) * LANES else 1
    packed_a = strips * PRODUCT_MR * kc + LANES * (PRODUCT_MR + 1)
    return PANELS * _packed_size(depth) + (packed_a + LANES - 1) // LANES * LANES


@helper
def _memory_on_amx(rows: int, columns: int, depth: int) -> int:
    """Return the size of a thread's scratch on AMX; float64, whose product has the same scratch, uses vectors."""
    return max(memory_of_thread(rows, columns, depth), _scratch_size(rows, columns, depth))


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
def _panel(
    rows: int, wide: int, deep: int, accumulate: bool, a: Left, a_at: int, packed_a: bool, b: ndarray, b_at: int,
    b_step: int, b_panel: int, unpacked: Right, unpacked_at: int, packs: bool, c: ndarray, c_at: int, c_row: int,
    end: End, column: int, soon_step: int, spare: ndarray,
) -> None:  # fmt: skip
    """Compute a column of tiles: c[c_at + i * c_row + j] for i < rows, j < wide, sums of `deep` products.

    packed_a: whether a consists of packed strips (pack_strips). If `packs`, the first tile copies its panels from
    unpacked[unpacked_at] to b; otherwise they are there. It must have FULL_HEIGHT rows: more than one strip. If
    `finish` in `end`, add its bias from `column` on, and apply relu. The first LINES tiles prefetch the next panels of
    `unpacked`, a line for each product; if soon_step is 0, nothing. spare: memory for a strip.
    """
    soon, soon_at = unpacked.numbers, unpacked_at + PANELS * unpacked.panel
    strips, biased = (rows + PRODUCT_MR - 1) // PRODUCT_MR, wide if end.bias.size > 0 else 0
    panels, tiles = 1 if wide <= panel_width(c) else 2, 0
    for strip in range(strips):
        top = strip * PRODUCT_MR
        high = min(PRODUCT_MR, rows - top)
        numbers, at, step = a.numbers, a_at + top, a.step
        if packed_a:
            at = a_at + top * deep
        elif a.row == 1 and at + (deep - 1) * step + PRODUCT_MR > numbers.size:  # the tile would read beyond a
            pack_strips(a, at, deep, high, spare)
            numbers, at, step = spare, 0, PRODUCT_MR
        i = 0
        while i < high:
            height, to = tile_rows(high - i, panels), c_at + (top + i) * c_row
            if packs and tiles == 0:
                if a.row > 1:
                    packing_tile(height, wide, deep, accumulate, a.numbers, a_at, a.row, unpacked.numbers, unpacked_at,
                                 unpacked.step, unpacked.panel, c, to, c_row, end.finish, end.bias, column, biased,
                                 end.relu, b, b_at, b_step)  # fmt: skip
                else:
                    packing_tile_side_by_side(height, wide, deep, accumulate, numbers, at, step, unpacked.numbers,
                                              unpacked_at, unpacked.step, unpacked.panel, c, to, c_row, end.finish,
                                              end.bias, column, biased, end.relu, b, b_at, b_step)  # fmt: skip
            elif a.row > 1:
                product_tile(height, wide, deep, accumulate, a.numbers, a_at + (top + i) * a.row, a.row,
                             b, b_at, b_step, b_panel, c, to, c_row, end.finish, end.bias, column, biased, end.relu,
                             soon, soon_at, soon_step)  # fmt: skip
            else:
                product_tile_side_by_side(height, wide, deep, accumulate, numbers, at + i, step,
                                          b, b_at, b_step, b_panel, c, to, c_row, end.finish, end.bias, column, biased,
                                          end.relu, soon, soon_at, soon_step)  # fmt: skip
            i, tiles, soon_at = i + height, tiles + 1, soon_at + deep * soon_step
            if tiles == LINES:
                soon_step = 0


@apart_jit
def _share(
    part: int, parts: int, a: Left, b: Right, depth: int, bias: ndarray, relu: bool, scratch: ndarray, out: ndarray
) -> None:
    """Compute the tiles of one thread."""
    rows, columns = out.shape
    nr, kc, vector = panel_width(out), block_depth(depth), out.reshape(out.size)
    pair, line = PANELS * nr, line_of(out)
    strips, pairs = (rows + PRODUCT_MR - 1) // PRODUCT_MR, (columns + pair - 1) // pair
    first, last = part * strips * pairs // parts, (part + 1) * strips * pairs // parts
    block = min(strips, block_rows(kc, nr) // PRODUCT_MR)  # strips in a block of a
    packed_b, strips_of_a = scratch, scratch[PANELS * _packed_size(depth) :]
    few_mr = few_rows(rows, not b.packed) if b.column == 1 else 0
    few = few_panels(few_mr)  # panels that few.py computes together
    pack_a = a.row == 1 and not few and (last - first) * PANELS >= PACK_A_PANELS * strips
    pack_a = pack_a and not has_short_sums(rows, columns, depth)
    packed = Left(strips_of_a, 1, PRODUCT_MR)
    for top in range(0, strips, block):  # blocks of MC rows ...
        here = min(block * PRODUCT_MR, rows - top * PRODUCT_MR)
        for k in range(0, depth, kc):  # ... and KC products
            deep = min(kc, depth - k)
            if pack_a:
                pack_strips(a, top * PRODUCT_MR * a.row + k * a.step, deep, here, strips_of_a)
            end = End(k + deep == depth and (relu or bias.size > 0), bias, relu)
            done = 0
            for number in range(first // strips * PANELS, (last + strips - 1) // strips * PANELS, PANELS):
                column, b_at = number * nr, k * b.step + number * b.panel  # a pair: the panels `number`, `number` + 1
                if number < done:
                    continue
                if few and number + few <= last * PANELS and (number + few) * nr <= columns:
                    done = number + few
                    for row in range(0, rows, few_mr):
                        few_tile(min(few_mr, rows - row), deep, k > 0, a.numbers, row * a.row + k * a.step, a.row,
                                 a.step, b.numbers, b_at, b.step, b.panel, vector, row * columns + column, columns,
                                 end.finish, bias, column, few * nr if bias.size > 0 else 0, relu)  # fmt: skip
                    continue
                # The pair's strips lo, ..., hi - 1 are in the block, and this thread computes them.
                before = number // PANELS * strips
                lo, hi = max(top, first - before), min(top + block, strips, last - before)
                if lo >= hi:
                    continue
                wide = min(pair, columns - column)
                panel, panel_at, panel_step, b_panel = packed_b, 0, pair if wide > nr else nr, nr
                in_place = b.packed or (b.column == 1 and hi - lo <= B_IN_PLACE_STRIPS)
                packs = b.column == 1 and not in_place and wide == pair
                if in_place and b_at + (wide - 1) // nr * b.panel + (deep - 1) * b.step + nr <= b.numbers.size:
                    panel, panel_at, panel_step, b_panel = b.numbers, b_at, b.step, b.panel
                elif b.column > 1:
                    pack_columns(b.numbers, b_at, b.column, deep, wide, packed_b, panel_step)
                elif not packs:
                    pack_rows(b.numbers, b_at, b.step, deep, wide, packed_b, panel_step)
                # If the sums have one piece, packed panels are contiguous, and so are transposed ones: whole rows of b.
                # To prefetch other panels, whose rows are far apart, made no product faster.
                contiguous = (b.packed or b.column > 1) and deep == depth and column + pair < columns
                soon_step = line if contiguous else 0
                i = lo * PRODUCT_MR
                c_at, high = i * columns + column, min(hi * PRODUCT_MR, rows) - i
                if pack_a:
                    _panel(high, wide, deep, k > 0, packed, (lo - top) * PRODUCT_MR * deep, True, panel, panel_at,
                           panel_step, b_panel, b, b_at, packs, vector, c_at, columns, end, column, soon_step,
                           strips_of_a)  # fmt: skip
                else:
                    _panel(high, wide, deep, k > 0, a, i * a.row + k * a.step, False, panel, panel_at,
                           panel_step, b_panel, b, b_at, packs, vector, c_at, columns, end, column, soon_step,
                           strips_of_a)  # fmt: skip


@helper
def serial_product(
    a: Left, b: Right, depth: int, bias: ndarray, relu: bool, scratch: ndarray, out: ndarray
) -> None:  # fmt: skip
    """Compute out = a @ b [+ bias] [relu] on this thread, with the bits of nn and nt without AMX.

    scratch: serial_scratch(rows, columns, depth) numbers
    """
    _share(0, 1, a, b, depth, bias, relu, scratch, out)


serial_scratch = _scratch_size


@apart_jit
def _pack_all(b: Right, depth: int, columns: int, packed: ndarray) -> None:
    """Pack all panels of b, unless `packed` contains them. It is 0 beyond the last column."""
    if packed[packed.size - 1] != 0:
        return
    packed[:] = 0
    for column in range(0, columns, b.panel):
        pack_rows(b.numbers, column, b.step, depth, min(b.panel, columns - column), packed[column * depth :], b.panel)
    packed[packed.size - 1] = 1


@helper
def _divides_rows(parts: int, out: ndarray) -> bool:
    """Return whether each thread computes some rows of all pairs, instead of strips of successive pairs.

    Then it reads its own rows of a, but all of b. So this suits an output that is higher than wide. And all threads
    have equally many narrow tiles, if the last pair is narrow.
    """
    strips, vectors = (out.shape[0] + PRODUCT_MR - 1) // PRODUCT_MR, whole_vectors(out.shape[1], out) // lanes(out)
    pair, rows, columns = 2 * PANELS, out.shape[0], out.shape[1]
    # The work of the busiest thread, in tiles of one vector
    by_pairs = (strips * ((vectors + pair - 1) // pair) + parts - 1) // parts * min(pair, vectors)
    by_rows = (strips + parts - 1) // parts * vectors
    return (rows >= columns and by_rows < by_pairs) or (rows >= 2 * columns and 16 * by_rows <= 17 * by_pairs)


@parallel_jit
def _divide(a: Left, b: Right, depth: int, bias: ndarray, relu: bool, scratch: ndarray, out: ndarray) -> None:
    """Divide the tiles of the output among the threads, as many as have scratch."""
    each = _scratch_size(out.shape[0], out.shape[1], depth)
    parts = scratch.size // each
    short = b.column == 1 and not b.packed and has_short_sums(out.shape[0], out.shape[1], depth)
    if parts == 1:  # without a parallel loop, no other thread has to wake up
        if short:
            share_of_short_sums(0, 1, a, b, depth, bias, relu, scratch, out)
        else:
            _share(0, 1, a, b, depth, bias, relu, scratch, out)
        return
    for part in prange(parts):
        own, number = scratch[part * each : (part + 1) * each], np.int64(part)
        # np.int64: the index of a prange loop is unsigned; with signed integers, Numba would compute in float64.
        if short:
            share_of_short_sums(number, parts, a, b, depth, bias, relu, own, out)
        elif _divides_rows(parts, out):
            strips = (out.shape[0] + PRODUCT_MR - 1) // PRODUCT_MR
            top, bottom = number * strips // parts * PRODUCT_MR, (number + 1) * strips // parts * PRODUCT_MR
            if top < bottom:
                rows = Left(a.numbers[top * a.row :], a.row, a.step)
                _share(0, 1, rows, b, depth, bias, relu, own, out[top:bottom])
        else:
            _share(number, parts, a, b, depth, bias, relu, own, out)


@helper
def _product(
    a: Left, b: Right, depth: int, bias: ndarray, relu: bool, packed: ndarray, scratch: ndarray, out: ndarray
) -> None:
    """Compute out[m, n] = the sum over k < depth of a[m, k] * b[k, n], plus bias[n]. packed: see reference.py."""
    if out.size == 0:
        return
    if depth == 0:
        _empty_sums(bias, relu, out)
    elif HAS_AMX and uses_amx(out.shape[0], out.shape[1], depth) and lanes(out) == LANES:
        # HAS_AMX is a constant: without AMX, Numba leaves this branch out.
        parts = min(thread_count(), scratch.size // _memory_on_amx(out.shape[0], out.shape[1], depth))
        amx_product(parts, a, b, depth, bias, relu, packed, scratch, out)
    elif packed.size > 0:
        _pack_all(b, depth, out.shape[1], packed)
        panels = Right(packed, panel_width(out) * depth, panel_width(out), 1, True)
        _divide(a, panels, depth, bias, relu, scratch, out)
    else:
        _divide(a, b, depth, bias, relu, scratch, out)


@jit
def nn(a: ndarray, b: ndarray, bias: ndarray, relu: bool, packed: ndarray, scratch: ndarray, out: ndarray) -> None:
    """Compute out (M, N) = a (M, K) @ b (K, N), plus bias (N,) unless its size is 0; then apply relu if `relu`.

    packed: of size 0, or packed_size(M, N, K) numbers, see reference.py; scratch: nn_scratch(M, N, K) numbers
    """
    k, n = b.shape
    left, right = Left(a.reshape(a.size), k, 1), Right(b.reshape(b.size), panel_width(b), n, 1, False)
    _product(left, right, k, bias, relu, packed, scratch, out)


@jit
def nt(a: ndarray, b: ndarray, scratch: ndarray, out: ndarray) -> None:
    """out (M, N) = a (M, K) @ b (N, K)^T"""
    k = b.shape[1]
    left, right = Left(a.reshape(a.size), k, 1), Right(b.reshape(b.size), panel_width(b) * k, 1, k, False)
    _product(left, right, k, scratch[:0], False, scratch[:0], scratch, out)


@jit
def tn(a: ndarray, b: ndarray, scratch: ndarray, out: ndarray) -> None:
    """out (M, N) = a (K, M)^T @ b (K, N)"""
    (k, m), n = a.shape, b.shape[1]
    left, right = Left(a.reshape(a.size), 1, m), Right(b.reshape(b.size), panel_width(b), n, 1, False)
    _product(left, right, k, scratch[:0], False, scratch[:0], scratch, out)


def nn_scratch(rows: int, columns: int, depth: int) -> int:
    """Return the number of elements of scratch, for out (rows, columns) and sums of `depth` products."""
    if rows <= MOST_FEW and columns * depth < FEW_SERIAL_BELOW:
        return int(_scratch_size(rows, columns, depth))
    return nt_scratch(rows, columns, depth)


def packed_size(rows: int, columns: int, depth: int) -> int:
    """Return the number of elements of nn's `packed`: all panels of b, and whether they are there."""
    if uses_amx(rows, columns, depth):  # more numbers than the panels of vectors: program/packed.py tells them by size
        return int(LINE + parts_size(columns, depth)) + 1
    return int(panels_size(columns, depth)) + 1


def nt_scratch(rows: int, columns: int, depth: int) -> int:
    if uses_amx(rows, columns, depth):
        return LINE + threads() * int(_memory_on_amx(rows, columns, depth))
    return (threads() if rows * columns * depth >= SERIAL_BELOW else 1) * int(_scratch_size(rows, columns, depth))


tn_scratch = nt_scratch
