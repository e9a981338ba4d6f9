"""The micro-kernel: one small tile of a sum of products, kept in vector registers from beginning to end.

Direct convolutions run on this loop. Matrix products and Winograd convolutions run on a simpler form in product.py.
conv/line.py, line_gradient.py, channels.py, tall.py and short.py are variants. For `rows` x `width` numbers of c, the
micro-kernel computes

    c[c_rows[i] + j]  =  sum over k of   a[a_rows[i] + a_offsets[k]]  *  b[k * b_step + j]

    i    up to MR rows, each anywhere in a and c: rows of a matrix, or pixels of an image
    j    up to NR columns (two vectors) or, with WIDE_MR rows, up to three vectors; contiguous in b and c
    k    a product of the sum. Its number of a is anywhere, too: a channel of a position in a convolution's kernel

Why it is fast: the result of a multiply-add is available after about 4 cycles, and a core begins two in each cycle. So
8 independent multiply-adds must be in flight, or the core idles. A tile of 8 x 2 vectors is 16 independent sums. For
these 16 multiply-adds it loads 2 vectors of b and 8 numbers of a, and uses each of them several times: the loads are
not the bottleneck. LLVM does not find this form in a loop over arrays: it cannot know that c does not overlap a and b,
so it stores and loads c each time. Therefore emitter.py writes the instructions.

The table a_offsets costs one more load for each k. Loops over positions and channels cost more: the CPU mispredicts
the end of a short inner loop, and LLVM adds the step to the address of each row, 8 additions for each k.

The sum is computed in the order of k, whatever the tile's position and size. So bits do not depend on how an output is
divided into tiles. The sum is stored in c or, if `accumulate`, added to c. If `finish`, the end of the layer (bias and
so on) is applied first: as a second pass, it would take as long as 5 to 20 products. Offsets and steps count numbers,
not bytes. Whole vectors of b are read, even if `width` ends within a vector.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic
from numpy import ndarray

from minidl.engine.jit import VECTOR_BYTES, apart_jit, helper

from .blocks import MR, WIDE_MR
from .emitter import Emitter, Sums, Value, instructions

MOST_VECTORS = 3  # a tile has 1 to 3 vectors of columns


@intrinsic
def lanes(typing: Any, array: Any) -> Any:
    """Return how many of the array's numbers a vector holds: a constant for the compiler."""
    count = VECTOR_BYTES // (array.dtype.bitwidth // 8)
    return types.int64(array), lambda context, *_: context.get_constant(types.int64, count)


@helper
def panel_width(array: ndarray) -> int:
    """Return the number of columns of a tile of this array's type, two vectors: NR for float32."""
    return 2 * lanes(array)


@helper
def line_of(array: ndarray) -> int:
    """Return how many of the array's numbers a cache line holds, without a division when the kernel runs."""
    return lanes(array) * (64 // VECTOR_BYTES)


@helper
def whole_vectors(columns: int, array: ndarray) -> int:
    """Return the number of columns, rounded up to whole vectors."""
    return (columns + lanes(array) - 1) // lanes(array) * lanes(array)


@helper
def panels_of(columns: int, array: ndarray) -> int:
    """Return into how many panels to divide columns of a convolution. A panel has two vectors, the last up to three.

    A tile of one vector would load a number of `a` for each multiply-add, and reach 50 to 67% of their rate.
    """
    return max(1, whole_vectors(columns, array) // panel_width(array))


@helper
def columns_of(number: int, columns: int, array: ndarray) -> int:
    """Return the width of panel `number` of these columns (panels_of)."""
    first = number * panel_width(array)
    return columns - first if number + 1 == panels_of(columns, array) else panel_width(array)


@helper
def widest_panel(columns: int, array: ndarray) -> int:
    """Return the width of the last panel of these columns: no other one is wider."""
    return columns_of(panels_of(columns, array) - 1, columns, array)


def end_of_layer(
    e: Emitter, totals: Sums, width: Value, finish: Value, end: Value, end_step: Value, others: list[Value], adds: Value
) -> Sums:
    """Return the totals of a tile or, if `finish`, max((totals + end[0]) * end[1] + end[2] + shortcut, end[3]).

    Each step is rounded; NaN stays NaN. Row end[i] begins at the pointer `end` + i * end_step. Row i of the shortcut
    begins at the pointer others[i]; if there is none (`adds` is false), nothing is added.
    """
    vectors = 1 + max(v for _, v in totals)

    def finished() -> Sums:
        bias, scale, shift, least = (e.columns(e.at(end, e.times(end_step, i)), vectors) for i in range(4))
        scaled = {(i, v): e.scale_shift(total, bias[v], scale[v], shift[v]) for (i, v), total in totals.items()}
        added = e.when(adds, lambda: e.plus_rows(scaled, others, width), scaled)
        return {(i, v): e.at_least(total, least[v]) for (i, v), total in added.items()}

    return e.when(finish, finished, totals)


@instructions
def _tile(
    e: Emitter, rows: Value, depth: Value, accumulate: Value, a: Value, a_offsets: Value, a_rows: Value, a_at: Value,
    b: Value, b_at: Value, b_step: Value, c: Value, c_rows: Value, c_at: Value, width: Value,
    finish: Value, end: Value, end_at: Value, end_step: Value, shortcut: Value, adds: Value,
) -> None:  # fmt: skip
    """Compute the tile above. a_at, b_at, c_at: the indices in a, b and c from which the offsets count.

    finish and the rest: as in `end_of_layer`; the shortcut has the layout of c
    """
    a, b, c, shortcut = e.at(a, a_at), e.at(b, b_at), e.at(c, c_at), e.at(shortcut, c_at)

    def tile(e: Emitter, vectors: int) -> None:
        height = WIDE_MR if vectors == MOST_VECTORS else MR
        numbers = e.row_numbers(rows, height)
        rows_of_c = [e.at(c, e.number(c_rows, i)) for i in numbers]
        rows_of_a = [e.at(a, e.number(a_rows, i)) for i in numbers]
        e.prefetch_rows(rows_of_c, vectors)

        def add_product(sums: Sums, k: Value, b_k: Value) -> Sums:
            offset = e.number(a_offsets, k)
            return e.rank_one(sums, (e.at(row, offset) for row in rows_of_a), e.columns(e.at(b, b_k), vectors))

        sums = e.loop(depth, [(0, b_step)], e.zeros(height, vectors), add_product)
        totals = e.plus(sums, accumulate, rows_of_c, width)
        others = [e.at(shortcut, e.number(c_rows, i)) for i in numbers]
        e.write(end_of_layer(e, totals, width, finish, e.at(end, end_at), end_step, others, adds), rows_of_c, width)

    e.narrowest(width, MOST_VECTORS, tile)


@apart_jit
def panel(
    rows: int, depth: int, accumulate: bool, a: ndarray, a_offsets: ndarray, a_rows: ndarray, a_at: int,
    b: ndarray, b_at: int, b_step: int, c: ndarray, c_rows: ndarray, c_at: int, width: int,
    finish: bool, end: ndarray, end_at: int, shortcut: ndarray,
) -> None:  # fmt: skip
    """Compute a column of tiles: any number of rows, and up to MOST_VECTORS vectors of columns.

    a, b, c: vectors (one axis) of one float type; a_at, b_at, c_at: the indices from which the offsets count.
    a_offsets (depth,), a_rows, c_rows (rows,): int64 offsets. end: four rows, see end_of_layer; shortcut: size 0 if
    there is none. Without `finish`, these two may be any arrays. The other arguments: see the formula above.
    """
    height = WIDE_MR if width > panel_width(a) else MR
    for i in range(0, rows, height):
        _tile(min(height, rows - i), depth, accumulate, a, a_offsets, a_rows[i:], a_at, b, b_at, b_step,
              c, c_rows[i:], c_at, width, finish, end, end_at, end.size // 4, shortcut, shortcut.size > 0)  # fmt: skip
