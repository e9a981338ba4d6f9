"""The micro-kernel: one small tile of a sum of products, kept in vector registers from beginning to end.

Direct convolutions run on this loop. Matrix products and Winograd convolutions run on a simpler form in product.py.
conv/channels.py and conv/tall.py are variants. For a tile of c, `rows` x `width` numbers, the micro-kernel computes

    c[c_rows[i] + j]  =  sum over t, k of   a[a_taps[t] + a_rows[i] + k * a_step]  *  b[b_taps[t] + k * b_step + j]

    i    up to MR rows, each anywhere in a and c: rows of a matrix, or pixels of an image
    j    up to NR columns (two vectors), contiguous in b and c
    t    a tap: a position, or a row, in the kernel of a convolution; tables contain the offsets of the taps
    k    advances by fixed steps within a tap

Why it is fast: the result of a multiply-add is available after about 4 cycles, and a core begins two in each cycle. So
8 independent multiply-adds must be in flight, or the core idles. A tile of 8 x 2 vectors is 16 independent sums. For
these 16 multiply-adds it loads 2 vectors of b and 8 numbers of a, and uses each of them several times: the loads are
not the bottleneck. LLVM does not find this form in a loop over arrays: it cannot know that c does not overlap a and b,
so it stores and loads c each time. Therefore emitter.py writes the instructions.

The sum is computed in the order of t and k, whatever the tile's position and size. So bits do not depend on how an
output is divided into tiles. The sum is stored in c or, if `accumulate`, added to c. Offsets and steps count numbers,
not bytes. Whole vectors of b are read, even if `width` ends within a vector.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic
from numpy import ndarray

from minidl.engine.jit import VECTOR_BYTES, apart_jit, jit

from .blocks import MR
from .emitter import Emitter, Sums, Value, instructions


@intrinsic
def lanes(typing: Any, array: Any) -> Any:
    """Return how many of the array's numbers a vector holds: a constant for the compiler."""
    count = VECTOR_BYTES // (array.dtype.bitwidth // 8)
    return types.int64(array), lambda context, *_: context.get_constant(types.int64, count)


@jit
def panel_width(array: ndarray) -> int:
    """Return the number of columns of a tile of this array's type, two vectors: NR for float32."""
    return 2 * lanes(array)


@instructions
def _tile(
    e: Emitter, rows: Value, taps: Value, depth: Value, accumulate: Value,
    a: Value, a_taps: Value, a_rows: Value, a_at: Value, a_step: Value,
    b: Value, b_taps: Value, b_at: Value, b_step: Value,
    c: Value, c_rows: Value, c_at: Value, width: Value,
) -> None:  # fmt: skip
    """Compute the tile above. a_at, b_at, c_at: the indices in a, b and c from which the offsets count."""
    a, b, c = e.at(a, a_at), e.at(b, b_at), e.at(c, c_at)

    def tile(e: Emitter, vectors: int) -> None:
        numbers = e.row_numbers(rows, MR)
        rows_of_c = [e.at(c, e.number(c_rows, i)) for i in numbers]
        rows_of_a = [e.at(a, e.number(a_rows, i)) for i in numbers]

        def add_tap(sums: Sums, t: Value) -> Sums:
            a_tap, b_tap = e.number(a_taps, t), e.number(b_taps, t)
            starts = [e.at(row, a_tap) for row in rows_of_a]

            def add_product(sums: Sums, _: Value, a_k: Value, b_k: Value) -> Sums:
                return e.rank_one(sums, (e.at(start, a_k) for start in starts), e.columns(e.at(b, b_k), vectors))

            return e.loop(depth, [(0, a_step), (b_tap, b_step)], sums, add_product)

        sums = e.loop(taps, [], e.zeros(MR, vectors), add_tap)
        e.write(e.plus(sums, accumulate, rows_of_c, width), rows_of_c, width)

    e.narrowest(width, tile)


@apart_jit
def panel(
    rows: int, taps: int, depth: int, accumulate: bool,
    a: ndarray, a_taps: ndarray, a_rows: ndarray, a_at: int, a_step: int,
    b: ndarray, b_taps: ndarray, b_at: int, b_step: int,
    c: ndarray, c_rows: ndarray, c_at: int, width: int,
) -> None:  # fmt: skip
    """Compute a column of tiles: any number of rows, and up to panel_width(a) columns.

    a, b, c: vectors (one axis) of one float type; a_at, b_at, c_at: the indices from which the offsets count.
    a_taps, b_taps (taps,), a_rows, c_rows (rows,): int64 offsets. The other arguments: see the formula above.
    """
    for i in range(0, rows, MR):
        _tile(min(MR, rows - i), taps, depth, accumulate, a, a_taps, a_rows[i:], a_at, a_step,
              b, b_taps, b_at, b_step, c, c_rows[i:], c_at, width)  # fmt: skip
