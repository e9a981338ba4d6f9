"""The tile of the weight gradient for neighbouring taps of a line: each number of x and of dy serves several of them.

    c[c_rows[q] + t * c_tap + j]  =  sum over lines l and pixels i < length of
        a[a_rows[q] + a_lines[l * length] + (i * step + t) * pixel]  *  b[(l * length + i) * b_step + j]

    q    a line of the window and an input channel         t    a tap, one of 3 or 2 neighbouring ones
    i    an output pixel of a line of dy                   j    output channels, one vector or two

The tile of matmul/tile.py has one row for each weight, and loads a number of x for each row and pixel. But pixel p of a
line of x is multiplied by pixel p of dy for tap 0, by pixel p - 1 for tap 1, by pixel p - 2 for tap 2. So this tile
loads a number of x once, and three pixels of dy, which serve all its rows q (step 1, one vector):

    tile.py, 8 weights             8 numbers + 1 vector  =  9 loads for 8 multiply-adds
    line_gradient.py, 8 x 3        8 numbers + 3 vectors = 11 loads for 24 multiply-adds

At the ends of a line, some of these products do not exist. Separate code adds the others there. The products of a sum
are in the order of matmul/tile.py, so the bits are the same. If dy is read in place, it comes from memory: the tile
requests the pixel that the next block begins with, `ahead` numbers further, and those after it.
"""

from __future__ import annotations

from collections.abc import Iterable

from numpy import ndarray

from minidl.engine.jit import REGISTERS, apart_jit, helper
from minidl.kernels.matmul.emitter import Emitter, Sums, Value, instructions
from minidl.kernels.matmul.tile import lanes, whole_vectors

from .geometry import Axis, ceildiv, shares
from .line import threes_of

HEIGHTS = ((0, 0), (8, 5), (4, 3)) if REGISTERS == 32 else ((0, 0), (4, 3))  # rows q of tiles, for 0 to 2 vectors
SHORTEST = 6, 16  # pixels in a line, for step 1 and 2: in shorter ones, its ends take longer than is saved


@helper
def computes_taps(axis: Axis, width: int, array: ndarray) -> bool:
    """Return whether this file has a tile for an axis of taps, and panels of at most this many columns."""
    vectors = whole_vectors(width, array) // lanes(array)
    wide = 2 * width > lanes(array) and vectors < len(HEIGHTS)  # half a vector: see Emitter.narrowest
    return shares(axis) and wide and axis.pixels >= SHORTEST[axis.step - 1]


@instructions
def _tile(
    e: Emitter, rows: Value, taps: Value, step: Value, lines: Value, length: Value, accumulate: Value, a: Value,
    a_rows: Value, a_lines: Value, pixel: Value, a_at: Value, b: Value, b_at: Value, b_step: Value,
    c: Value, c_rows: Value, c_tap: Value, c_at: Value, width: Value, ahead: Value,
) -> None:  # fmt: skip
    """Compute the tile above, or, if `accumulate`, add its sums to c."""
    a, b, c = e.at(a, a_at), e.at(b, b_at), e.at(c, c_at)

    def tile(vectors: int, height: int, taps: int, step: int) -> None:
        numbers, most = e.row_numbers(rows, height), (taps - 1) // step
        rows_of_a = [e.at(a, e.number(a_rows, q)) for q in numbers]
        rows_of_c = [e.at(e.at(c, e.number(c_rows, q)), e.times(c_tap, t)) for t in range(taps) for q in numbers]
        pixels = e.times(pixel, step)

        def add_pixel(sums: Sums, x: Value, dy: Value, distances: Iterable[int]) -> Sums:
            """Add the products of the pixels of x from x on and pixel dy - d of dy, for each distance d."""
            vectors_of_dy = {d: e.columns(e.at(e.at(b, dy), e.times(b_step, -d)), vectors) for d in distances}
            sums = dict(sums)
            for place in range(step):
                served = [t for t in range(place, taps, step) if (t - place) // step in vectors_of_dy]
                for q in range(height if served else 0):
                    number = e.broadcast(e.number(e.at(rows_of_a[q], x), e.times(pixel, place)))
                    for t in served:
                        for v, vector in enumerate(vectors_of_dy[(t - place) // step]):
                            at = t * height + q, v
                            sums[at] = e.multiply_add(number, vector, sums[at])
            return sums

        def add_inner_pixel(sums: Sums, _: Value, x: Value, dy: Value) -> Sums:
            for v in range(vectors):
                e.prefetch(b, e.sum(e.sum(dy, ahead), v * e.lanes))
            return add_pixel(sums, x, dy, range(most + 1))

        def add_line(sums: Sums, _: Value, first: Value, dy: Value) -> Sums:
            x = e.number(a_lines, first)
            for i in range(most):
                sums = add_pixel(sums, x, dy, range(i + 1))
                x, dy = e.sum(x, pixels), e.sum(dy, b_step)
            rounds = e.sum(length, e.integer(-most))
            sums = e.loop(rounds, [(x, pixels), (dy, b_step)], sums, add_inner_pixel)
            x, dy = e.sum(x, e.times(rounds, pixels)), e.sum(dy, e.times(rounds, b_step))
            for i in range(most):
                sums = add_pixel(sums, x, dy, range(i + 1, most + 1))
                x, dy = e.sum(x, pixels), e.sum(dy, b_step)
            return sums

        steps = [(0, length), (0, e.times(length, b_step))]
        sums = e.loop(lines, steps, e.zeros(taps * height, vectors), add_line)
        e.write(e.plus(sums, accumulate, rows_of_c, width), rows_of_c, width)

    def heights(vectors: int, taps: int, step: int) -> None:
        e.lowest(rows, HEIGHTS[vectors], lambda height: tile(vectors, height, taps, step))

    def widths(taps: int, step: int) -> None:
        e.fewest_vectors(width, len(HEIGHTS) - 1, lambda vectors: heights(vectors, taps, step))

    with e.builder.if_else(e.builder.icmp_signed("==", step, e.integer(1))) as (one, two):
        with one:
            e.lowest(taps, (3, 2), lambda taps: widths(taps, 1))
        with two:
            widths(3, 2)


@apart_jit
def line_gradient(
    taps: int, step: int, lines: int, length: int, accumulate: bool, a: ndarray, a_rows: ndarray, a_lines: ndarray,
    pixel: int, a_at: int, b: ndarray, b_at: int, b_step: int, c: ndarray, c_rows: ndarray, c_tap: int, c_at: int,
    width: int, ahead: int,
) -> None:  # fmt: skip
    """Compute the sums of the formula above for all rows q and all `taps`, at least 2.

    a_at, b_at, c_at: the indices from which the offsets count; width: the columns, at most two vectors; length: at
    least 3; a_lines: the offsets of all pixels, of which those of the first pixels of lines are used
    """
    vectors, first = whole_vectors(width, b) // lanes(b), 0
    each = ceildiv(a_rows.size, ceildiv(a_rows.size, HEIGHTS[vectors][0]))
    while first < taps:
        some = 3 if first < 3 * threes_of(taps) else 2
        for q in range(0, a_rows.size, each):
            _tile(min(each, a_rows.size - q), some, step, lines, length, accumulate, a, a_rows[q:], a_lines, pixel,
                  a_at + first * pixel, b, b_at, b_step, c, c_rows[q:], c_tap, c_at + first * c_tap,
                  width, ahead)  # fmt: skip
        first += some
