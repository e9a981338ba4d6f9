"""Matrix products on AMX (amx.py): strips of a and panels of b, split into parts, and divided among the threads.

The threads divide the panels among themselves (the strips, if there are more of them). Each splits what it needs into
its own memory. It would take longer to read parts that another core has just written, than to split them once more.
The loops are those of BLIS (blocks.py):

    for up to 1024 columns
        for a block of strips                          that, with its sums, stays in L2; or all, if the strips alone do
            for a piece of 128 products
                split the strips                       6 bytes per product; all with the first piece, if L2 has room
                for each panel
                    for each strip: multiply           a tile of 32 x 32 sums, which continues from earlier ones
                    during the first strip:            split the next panel, 24 KB: the vector units are free then

If there are several pieces, the sums stay in memory of their own until the last one. In `out` the rows of a tile may be
2 KB apart: then they share few sets of L1, and each piece would load them from L2 and store them there.

The sums are in the order of k whatever the blocks are, since a tile that continues from earlier sums adds to the same
numbers. So bits depend neither on the number of threads nor on the caches. They differ from those of cpu.py, which
computes products that are too small to gain from AMX (`uses_amx`).
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import HAS_AMX, apart_jit, helper, parallel_jit, prange

from .amx import (
    BLOCK,
    SHAPES,
    SIDE,
    begin_tiles,
    count_of,
    end_tiles,
    finish_row,
    multiply,
    multiply_and_split,
    parts_size,
    split_panels,
    split_strip,
    split_transposed,
)
from .blocks import LINE, MC_KC, aligned
from .operands import Left, Right
from .pack import pack_columns

LEAST = 128  # rows, columns and depth; measured: for smaller products vectors are faster
DEPTH = 128  # products of a piece of a panel, which stays in L1
WIDE = 1024  # a thread computes at most this many columns at a time: more would need more memory for sums
SPARE = DEPTH * SIDE + 2 * SIDE  # memory for a piece of a panel, transposed by pack_columns


@helper
def uses_amx(rows: int, columns: int, depth: int) -> bool:
    """Return whether a float32 product of this shape is computed here."""
    return HAS_AMX and min(rows, columns, depth) >= LEAST


@helper
def depth_of_strips(rows: int, depth: int) -> int:
    """Return how many k of a are split at a time: all if the strips stay in L2, since long rows are read faster."""
    return depth if parts_size(rows, depth) <= MC_KC else DEPTH


@helper
def block_of_strips(rows: int, columns: int, depth: int) -> int:
    """Return the strips of a block: all if they fit into L2 (their sums may not), else as many as fill it with sums."""
    if parts_size(rows, depth) <= MC_KC:
        return count_of(rows)
    return min(count_of(rows), max(1, 2 * MC_KC // (DEPTH // SIDE * BLOCK + SIDE * min(columns, WIDE))))


@helper
def tiles_of_strip(columns: int) -> int:
    """Return how many tiles of sums a strip has at a time."""
    return count_of(min(columns, WIDE))


@helper
def memory_of_sums(rows: int, columns: int, depth: int) -> int:
    """Return the size of a thread's memory for sums: a block of strips, or one tile if there is only one piece."""
    return SIDE * SIDE * (1 if depth <= DEPTH else block_of_strips(rows, columns, depth) * tiles_of_strip(columns))


@helper
def memory_of_thread(rows: int, columns: int, depth: int) -> int:
    """Return the size of a thread's memory: SPARE, pieces of two panels, the sums, and a block of strips."""
    strips = block_of_strips(rows, columns, depth) * parts_size(1, depth_of_strips(rows, depth))
    return SPARE + 2 * DEPTH // SIDE * BLOCK + memory_of_sums(rows, columns, depth) + strips


@apart_jit
def _split_a(a: Left, top: int, rows: int, k: int, depth: int, spare: ndarray, target: ndarray) -> None:
    """Split `depth` columns of `rows` rows of a, beginning with column k and row `top`, into strips."""
    size = parts_size(1, depth)
    for first in range(0, rows, SIDE):
        some, to = min(SIDE, rows - first), first // SIDE * size
        at = (top + first) * a.row + k * a.step
        if a.step == 1:
            split_strip(a.numbers, at, a.row, some, depth, target, to)
        else:
            split_transposed(a.numbers, at, a.step, some, depth, spare, target, to)


@apart_jit
def _split_b(b: Right, left: int, columns: int, k: int, depth: int, spare: ndarray, target: ndarray) -> None:
    """Split `depth` rows of some columns of b, beginning with row k and column `left`, into panels.

    If b is transposed, there are at most 32 columns.
    """
    if b.column == 1:
        split_panels(b.numbers, k * b.step + left, b.step, columns, depth, target, 0)
        return
    pack_columns(b.numbers, left * b.column + k, b.column, depth, columns, spare, SIDE)
    split_panels(spare, 0, SIDE, columns, depth, target, 0)


@apart_jit
def _panel(
    first: int, last: int, column: int, wide: int, blocks: int, begins: bool, ends: bool, own: ndarray, strips: int,
    strip: int, b: ndarray, b_at: int, splits: bool, x: ndarray, x_at: int, x_step: int, to: int, sums: int,
    bias: ndarray, relu: bool, out: ndarray, columns: int,
) -> None:  # fmt: skip
    """Multiply a piece of some strips, rows first to last - 1 of out, by one of a panel, and add this to their sums.

    The panel is b[b_at:], with `blocks` blocks for `wide` columns from `column` on. begins, ends: whether this is the
    first piece, and whether it is the last. If it is both, the sums of whole tiles go to `out` without a detour.
    own: the thread's memory; strips, sums, to: places in it; strip: the distance between two strips. If `splits`, the
    next panel, x[x_at + k * x_step + j], is split beside the first strip, and goes to own[to:].
    columns: those of all of out, a vector
    """
    straight, biased = begins and ends, wide if bias.size > 0 else 0
    for row in range(first, last, SIDE):
        high, a_at, at = min(SIDE, last - row), strips + (row - first) // SIDE * strip, row * columns + column
        tile = 0 if straight else (row - first) // SIDE * tiles_of_strip(columns) + column % WIDE // SIDE
        c_at = sums + tile * SIDE * SIDE
        if straight and high == SIDE and wide == SIDE:
            if splits and row == first:
                multiply_and_split(blocks, False, own, a_at, b, b_at, out, at, columns, x, x_at, x_step, own, to)
            else:
                multiply(high, wide, blocks, False, own, a_at, b, b_at, out, at, columns, out, at, columns)
            for i in range(high if relu or biased else 0):
                finish_row(out, at + i * columns, out, at + i * columns, wide, bias, column, biased, relu)
            continue
        if splits and row == first:
            multiply_and_split(blocks, not begins, own, a_at, b, b_at, own, c_at, SIDE, x, x_at, x_step, own, to)
        elif ends:
            multiply(high, wide, blocks, not begins, own, a_at, b, b_at, own, c_at, SIDE, out, at, columns)
        else:
            multiply(high, wide, blocks, not begins, own, a_at, b, b_at, own, c_at, SIDE, own, c_at, SIDE)
        for i in range(high if ends else 0):
            finish_row(own, c_at + i * SIDE, out, at + i * columns, wide, bias, column, biased, relu)


@apart_jit
def _share(
    top: int, bottom: int, left: int, right: int, a: Left, b: Right, depth: int, bias: ndarray, relu: bool,
    packed: ndarray, own: ndarray, out: ndarray,
) -> None:  # fmt: skip
    """Compute out[top:bottom, left:right], at most WIDE columns; top and left are multiples of 32."""
    columns, vector, numbers = out.shape[1], out.reshape(out.size), b.numbers
    here, there = SPARE, SPARE + DEPTH // SIDE * BLOCK  # the panel, and the next one, in `own`
    sums = SPARE + 2 * DEPTH // SIDE * BLOCK
    strips = sums + memory_of_sums(out.shape[0], columns, depth)
    spare = own[:SPARE]
    ready = False  # whether the panel was split beside the previous one
    whole = depth_of_strips(out.shape[0], depth)
    block = block_of_strips(out.shape[0], columns, depth) * SIDE
    long = 0  # k in the strips
    begin_tiles(SHAPES)
    for first in range(top, bottom, block):
        last = min(first + block, bottom)
        for k in range(0, depth, DEPTH):
            deep = min(DEPTH, depth - k)
            blocks, begins, ends = count_of(deep), k == 0, k + deep == depth
            if k % whole == 0:
                long = min(whole, depth - k)
                _split_a(a, first, last - first, k, long, spare, own[strips:])
            strip, strips_at = parts_size(1, long), strips + k % whole // SIDE * BLOCK
            for column in range(left, right, SIDE):
                wide = min(SIDE, right - column)
                if packed.size > 0:
                    at = parts_size(column, depth) + k // SIDE * BLOCK
                    _panel(first, last, column, wide, blocks, begins, ends, own, strips_at, strip, packed, at,
                           False, packed, 0, 0, 0, sums, bias, relu, vector, columns)  # fmt: skip
                    continue
                if not ready:
                    _split_b(b, column, wide, k, deep, spare, own[here:])
                next_k, next_column = (k, column + SIDE) if column + SIDE < right else (k + DEPTH, left)
                ready = deep % SIDE == 0 and next_k + deep <= depth and next_column + SIDE <= right
                ready = ready and wide == SIDE and last - first >= SIDE
                at = next_k * b.step + next_column * b.column
                if ready and b.column > 1:
                    pack_columns(numbers, at, b.column, deep, SIDE, spare, SIDE)
                    _panel(first, last, column, wide, blocks, begins, ends, own, strips_at, strip, own, here,
                           True, own, 0, SIDE, there, sums, bias, relu, vector, columns)  # fmt: skip
                else:
                    _panel(first, last, column, wide, blocks, begins, ends, own, strips_at, strip, own, here,
                           ready, numbers, at, b.step, there, sums, bias, relu, vector, columns)  # fmt: skip
                here, there = there, here
    end_tiles(SHAPES)


@parallel_jit
def amx_product(
    parts: int, a: Left, b: Right, depth: int, bias: ndarray, relu: bool, packed: ndarray, scratch: ndarray,
    out: ndarray,
) -> None:  # fmt: skip
    """Compute out[m, n] = the sum over k < depth of a[m, k] * b[k, n], plus bias[n], on `parts` threads.

    packed: see reference.py; scratch: memory_of_thread numbers for each of the threads, and LINE more
    """
    rows, columns = out.shape
    strips, panels = count_of(rows), count_of(columns)
    sides, memory, split = max(strips, panels), aligned(scratch), aligned(packed)
    each = memory.size // parts // LINE * LINE
    if packed.size > 0 and packed[packed.size - 1] == 0:
        _split_b(b, 0, columns, 0, depth, memory, split)
        packed[packed.size - 1] = 1
    for part in prange(parts):
        p = np.int64(part)  # a prange index is unsigned: Numba would compute unsigned + signed in float64
        first, last = p * sides // parts * SIDE, (p + 1) * sides // parts * SIDE
        own = memory[p * each : (p + 1) * each]
        if panels >= strips:
            top, bottom, left, right = 0, rows, first, min(last, columns)
        else:
            top, bottom, left, right = first, min(last, rows), 0, columns
        for column in range(left, right, WIDE):
            _share(top, bottom, column, min(column + WIDE, right), a, b, depth, bias, relu, split, own, out)
