"""The tile of neighbouring pixels of a line: a number of x that several pixels read is loaded once.

    c[c_rows[i] + j]  =  sum over r < rounds, t < taps of
                         a[a_at + (i * step + t) * pixel + offsets[r * taps]]  *  b[b_at + (r * taps + t) * b_step + j]

    i    pixels next to each other in a line of outputs; a_at belongs to the first one
    j    output channels, one vector or two
    r    an input channel of a group of neighbouring taps (below)

With step = 1, pixel i reads at tap t what pixel i + 1 reads at tap t - 1. In matmul/tile.py each of them loads this
number. Here the loop over the numbers is outside, and each is multiplied by all taps that use it:

    tile.py, 8 pixels, 2 vectors, 3 taps       3 x (8 numbers + 2 vectors) = 30 loads for 48 multiply-adds
    line.py                                     10 numbers + 6 vectors     = 16

So a single vector of outputs suffices as well: 12 pixels, 14 numbers and 3 vectors are 17 loads for 36 multiply-adds,
instead of 40. An Intel Xeon (family 6, model 106) loads about two numbers in the time of three multiply-adds: there,
this tile reaches 89 to 95% of the rate of multiply-adds, the tile of one vector in matmul/tile.py 50%.

The vectors of b for all taps of a group stay in registers, so a group has 3 or 2 taps. A window of 5 columns has groups
of 3 and 2 taps, one of 7 columns 3, 2 and 2. All groups of 3 taps, of all lines of the window, come first.
"""

from __future__ import annotations

from numpy import ndarray

from minidl.engine.jit import REGISTERS, apart_jit, helper
from minidl.kernels.matmul.emitter import Emitter, Sums, Value, instructions
from minidl.kernels.matmul.tile import end_of_layer, lanes, whole_vectors

# The pixels of a high, a middle and a low tile, for 0 to 2 vectors; 0: there is no such tile
HEIGHTS = ((0, 0, 0), (8, 8, 8), (4, 4, 4))
if REGISTERS == 32:
    HEIGHTS = ((0, 0, 0), (12, 8, 8), (8, 6, 4))


@helper
def _heights(width: int, array: ndarray) -> tuple[int, int, int]:
    """Return the pixels of a high, a middle and a low tile with this many columns."""
    vectors = whole_vectors(width, array) // lanes(array)
    if 2 * width <= lanes(array) or vectors >= len(HEIGHTS):
        return HEIGHTS[0]  # half a vector: see Emitter.narrowest; more vectors: tile.py needs few loads, too
    return HEIGHTS[vectors]


@helper
def pixels_in_tiles(pixels: int, width: int, array: ndarray) -> int:
    """Return how many of the pixels of a line tiles of this width compute: as many as possible, unless there are few.

    A low tile alone would load nearly as much as tile.py, and read the weights twice as often.
    """
    high, middle, low = _heights(width, array)
    unit = high - middle if high > middle else low
    return pixels // unit * unit if 0 < middle <= pixels else 0


@helper
def _next_tile(rest: int, heights: tuple[int, int, int]) -> int:
    """Return the pixels of the next tile if `rest` pixels remain: none remain after it, or enough for another tile."""
    for height in heights:
        if rest == height or rest >= height + heights[2]:
            return height
    return heights[2]


@helper
def threes_of(taps: int) -> int:
    """Return how many groups of 3 taps there are among `taps` taps, at least 2; all others have 2."""
    return (taps - 2 * (-taps % 3)) // 3


@instructions
def _tile(
    e: Emitter, pixels: Value, step: Value, threes: Value, twos: Value, accumulate: Value, a: Value, offsets: Value,
    pixel: Value, a_at: Value, b: Value, b_at: Value, b_step: Value, c: Value, c_rows: Value, c_at: Value, width: Value,
    finish: Value, end: Value, end_at: Value, end_step: Value, shortcut: Value, adds: Value,
) -> None:  # fmt: skip
    """Compute a tile; threes, twos: the rounds with groups of 3 and of 2 taps. If `accumulate`, add the sums to c; if
    `finish`, apply the end of the layer (matmul/tile.py)."""
    a, b, c, shortcut = e.at(a, a_at), e.at(b, b_at), e.at(c, c_at), e.at(shortcut, c_at)

    def tile(vectors: int, pixels: int, step: int) -> None:
        rows_of_c = [e.at(c, e.number(c_rows, i)) for i in range(pixels)]
        others = [e.at(shortcut, e.number(c_rows, i)) for i in range(pixels)]
        e.prefetch_rows(rows_of_c, vectors)

        def add_group(taps: int, rounds: Value, first: Value, sums: Sums) -> Sums:
            def add_products(sums: Sums, _: Value, product: Value, b_r: Value) -> Sums:
                rows_of_b = [e.columns(e.at(e.at(b, b_r), e.times(b_step, t)), vectors) for t in range(taps)]
                at, sums = e.at(a, e.number(offsets, product)), dict(sums)
                for place in range((pixels - 1) * step + taps):
                    if place and place % 4 == 0:  # few distances: they stay in registers
                        at = e.in_register(e.at(at, e.times(pixel, 4)))
                    number = e.broadcast(e.number(at, e.times(pixel, place % 4)))
                    for t in range(taps):
                        i, rest = divmod(place - t, step)
                        for v in range(vectors if rest == 0 and 0 <= i < pixels else 0):
                            sums[i, v] = e.multiply_add(number, rows_of_b[t][v], sums[i, v])
                return sums

            begin = first, e.times(first, b_step)
            return e.when(
                e.builder.icmp_signed(">", rounds, e.integer(0)),
                lambda: e.loop(rounds, [(begin[0], taps), (begin[1], e.times(b_step, taps))], sums, add_products),
                sums,
            )  # fmt: skip

        sums = add_group(3, threes, e.integer(0), e.zeros(pixels, vectors))
        if step == 1:  # pixels 2 apart share no number of a group of 2 taps
            sums = add_group(2, twos, e.times(threes, 3), sums)
        totals = e.plus(sums, accumulate, rows_of_c, width)
        e.write(end_of_layer(e, totals, width, finish, e.at(end, end_at), end_step, others, adds), rows_of_c, width)

    def tiles(vectors: int, step: int) -> None:
        e.lowest(pixels, sorted(set(HEIGHTS[vectors]), reverse=True), lambda height: tile(vectors, height, step))

    with e.builder.if_else(e.builder.icmp_signed("==", step, e.integer(1))) as (one, two):
        with one:
            e.fewest_vectors(width, len(HEIGHTS) - 1, lambda vectors: tiles(vectors, 1))
        with two:
            e.fewest_vectors(width, len(HEIGHTS) - 1, lambda vectors: tiles(vectors, 2))


@apart_jit
def line_panel(
    lines: int, length: int, step: int, threes: int, twos: int, accumulate: bool, a: ndarray, a_offsets: ndarray,
    a_rows: ndarray, pixel: int, a_at: int, b: ndarray, b_at: int, b_step: int, c: ndarray, c_rows: ndarray, c_at: int,
    width: int, finish: bool, end: ndarray, end_at: int, shortcut: ndarray,
) -> None:  # fmt: skip
    """Compute a column of tiles, for `length` pixels in each of some lines: a sum of heights of tiles of this width.

    step: 1 or 2; threes, twos: the rounds of the sum that have groups of 3 and of 2 taps; pixel: the distance from one
    pixel of `a` to the next. The other arguments: as in matmul/tile.py's panel.
    """
    heights = _heights(width, a)
    for line in range(lines):
        i, end_of_line = line * length, (line + 1) * length
        while i < end_of_line:
            pixels = _next_tile(end_of_line - i, heights)
            _tile(pixels, step, threes, twos, accumulate, a, a_offsets, pixel, a_at + a_rows[i], b, b_at, b_step, c,
                  c_rows[i:], c_at, width, finish, end, end_at, end.size // 4, shortcut, shortcut.size > 0)  # fmt: skip
            i += pixels
