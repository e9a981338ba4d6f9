"""The micro-kernel for matrix products: a tile of rows at equal distances, and a sum over k only.

    c[c_at + i * c_row + j]  =  sum over k < depth of  a[a_at + i * a_row + k * a_step] * b[b_at + k * b_step + j]

for j within the first panel of b; the second panel begins b_panel numbers after the first one. If `accumulate`, the sum
is added to c. One of a_row and a_step is 1: `a` is either a matrix with contiguous rows or one whose rows lie side by
side, as in a packed strip (pack.py).

With 32 registers a tile has 24 vectors of sums: 6 rows x 4 vectors or, if only one panel remains, 12 rows x 2 vectors.
Both do 24 multiply-adds for each k, in 12 cycles. The first loads 10 times in this time (4 vectors of b, 6 numbers of
a), the second 14 times. Some CPUs load little more than one vector of 512 bits per cycle: there, 14 loads take nearly
as long as the multiply-adds, and any other load delays them, such as that of an address that found no register. On an
Intel Xeon (Ice Lake) the tile of 6 rows reaches 99% of the multiply-add rate, the tile of 12 rows 84 to 93%. With 16
registers, a tile has 6 rows and 2 vectors.

The last rows of a product have a lower tile. It may have missing rows. In a side-by-side `a`, they are any numbers in
memory; their sums are computed, and overwritten (`Emitter.write`).

The panels of b are contiguous copies, since rows that are far apart share few sets of the caches. The first tile that
needs them makes these copies (packing_tile): a loop that only copies would wait for each line.

The code around the loop over k matters: a loop over 32 products takes only as long as the code before and after it. So
there are no tables, and stores use masks only if a tile is not full. The bias and relu of a linear layer are applied
while the sums are in registers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy import ndarray

from minidl.engine.jit import VECTOR_BYTES, apart_jit, helper

from .blocks import HEIGHTS, HEIGHTS_OF_TWO, PANELS, tile_rows
from .emitter import Emitter, Sums, Value, instructions
from .requests import next_request
from .tile import lanes, line_of, panel_width, whole_vectors

MOST_VECTORS = 2 * PANELS
FULL_HEIGHT = HEIGHTS_OF_TWO[0] if PANELS == 2 else HEIGHTS[0]  # rows of a tile of MOST_VECTORS
AHEAD = 16  # for each k, the tile that packs b requests row k + AHEAD
LINES = max(1, MOST_VECTORS * VECTOR_BYTES // 64)  # cache lines in a row of a tile's panels


@helper
def tile_columns(columns: int, array: ndarray) -> int:
    """Return the columns of the next tile of a product, if `columns` remain: two panels, or one, or what remains.

    Five vectors are divided into 2 and 3: a tile of one vector would load a number of `a` for each multiply-add.
    """
    panels = 1 if whole_vectors(columns, array) == 5 * lanes(array) else PANELS
    return min(columns, panels * panel_width(array))


def with_bias_and_relu(e: Emitter, totals: Sums, bias: Value, biased: Value, relu: Value) -> Sums:
    """Return the sums plus bias in the first `biased` columns; if `relu`, at least 0."""
    masks = {v: e.mask(v, biased) for v in dict.fromkeys(v for _, v in totals)}
    biases = {  # -0 for no bias: adding -0 changes no bit
        v: e.builder.select(mask, e.load_masked(bias, v * e.lanes, mask), e.filled(-0.0)) for v, mask in masks.items()
    }
    least = e.builder.select(relu, e.filled(0.0), e.filled(-np.inf))
    return {(i, v): e.at_least(e.builder.fadd(total, biases[v]), least) for (i, v), total in totals.items()}


def _make_product_tile(side_by_side: bool, packs: bool = False, of_planes: bool = False) -> Any:
    """Return the tile for one of the two layouts of a:

    side_by_side    a[a_at + i + k * a_step]    packed strips, and transposed matrices
    otherwise       a[a_at + i * a_step + k]    rows of a matrix

    packs: a tile of FULL_HEIGHT rows and MOST_VECTORS vectors, which also copies its two panels of b to `soon`:

        soon[soon_at + k * soon_step + j] = b[b_at + k * b_step + j]

    of_planes: a tile whose lines of c are in a cache, as the planes of a convolution are. It does not request them.
    Instead, it requests soon[later_at + k * later_step] for each k: see requests.py.
    """

    @instructions
    def product_tile(
        e: Emitter, rows: Value, width: Value, depth: Value, accumulate: Value, a: Value, a_at: Value, a_step: Value,
        b: Value, b_at: Value, b_step: Value, b_panel: Value, c: Value, c_at: Value, c_row: Value,
        finish: Value, bias: Value, bias_at: Value, biased: Value, relu: Value,
        soon: Value, soon_at: Value, soon_step: Value, later_at: Value, later_step: Value,
    ) -> None:  # fmt: skip
        """Compute the tile above, of at most tile_rows(rows, panels) rows and MOST_VECTORS vectors of columns.

        If `finish`, add bias to the first `biased` columns and, if `relu`, apply relu. For each k, the tile of
        MOST_VECTORS requests the line of soon[soon_at + k * soon_step] into the second-level cache, unless it packs.
        Before the loop, the tile requests its lines of c, since they may be in no cache.
        """
        later = e.in_register(e.at(soon, later_at))
        a, b, c, bias, soon = e.at(a, a_at), e.at(b, b_at), e.at(c, c_at), e.at(bias, bias_at), e.at(soon, soon_at)
        step_of_k = a_step if side_by_side else e.integer(1)

        def tile(vectors: int, height: int) -> None:
            numbers = e.row_numbers(rows, height)
            rows_of_c = [e.at(c, e.times(i, c_row)) for i in numbers]
            rows_of_a = [] if side_by_side else [e.in_register(e.at(a, e.times(i, a_step))) for i in numbers]
            panels = [(b, min(vectors, 2)), (e.in_register(e.at(b, b_panel)), vectors - 2)][: (vectors + 1) // 2]
            ahead = e.in_register(e.at(b, e.times(AHEAD, b_step))) if packs else b
            if not of_planes:
                e.prefetch_rows(rows_of_c, vectors)

            def add_product(sums: Sums, _: Value, a_k: Value, b_k: Value, soon_k: Value, later_k: Value) -> Sums:
                if vectors == MOST_VECTORS and not packs:
                    e.prefetch(soon, soon_k)
                if of_planes:
                    e.prefetch(later, later_k)
                if side_by_side:
                    start = e.at(a, a_k)
                    pointers = [e.at(start, i) for i in range(height)]
                else:
                    pointers = [e.at(row, a_k) for row in rows_of_a]
                columns = [column for panel, count in panels for column in e.columns(e.at(panel, b_k), count)]
                if packs:
                    for v, column in enumerate(columns):
                        e.prefetch(e.at(ahead, b_k), v * e.lanes, level=1)
                        e.store(column, e.at(soon, soon_k), v * e.lanes)
                return e.rank_one(sums, pointers, columns)

            counters = [(0, step_of_k), (0, b_step), (0, soon_step), (0, later_step)]
            sums = e.loop(depth, counters, e.zeros(height, vectors), add_product)
            totals = e.plus(sums, accumulate, rows_of_c, width)
            finished = partial(with_bias_and_relu, e, totals, bias, biased, relu)
            e.write(e.when(finish, finished, totals), rows_of_c, width)

        def heights(vectors: int) -> None:
            e.lowest(rows, HEIGHTS if vectors <= 2 else HEIGHTS_OF_TWO, partial(tile, vectors))

        if packs:
            tile(MOST_VECTORS, FULL_HEIGHT)
        else:
            e.fewest_vectors(width, MOST_VECTORS, heights)

    return product_tile


product_tile, product_tile_side_by_side = _make_product_tile(False), _make_product_tile(True)
packing_tile, packing_tile_side_by_side = _make_product_tile(False, packs=True), _make_product_tile(True, packs=True)
plane_tile, plane_tile_side_by_side = (_make_product_tile(beside, of_planes=True) for beside in (False, True))


@helper
def count_of_tiles(rows: int, columns: int, array: ndarray) -> int:
    """Return how many tiles product_panel computes for all panels of this many columns."""
    tiles, column = 0, 0
    while column < columns:
        width = tile_columns(columns - column, array)
        height = max(1, tile_rows(rows, 1 if width <= panel_width(array) else 2))
        tiles, column = tiles + (rows + height - 1) // height, column + width
    return tiles


@apart_jit
def product_panel(
    rows: int, width: int, depth: int, kc: int, accumulate: bool, a: ndarray, a_at: int, a_row: int, a_step: int,
    b: ndarray, b_at: int, b_step: int, b_panel: int, c: ndarray, c_at: int, c_row: int, soon: ndarray, soon_at: int,
    requests: ndarray,
) -> None:  # fmt: skip
    """Compute a column of tiles: any number of rows, and tile_columns(width) = width columns; a, b, c are vectors.

    a_row, a_step: the distances between rows and between successive k, one of which is 1
    kc: the number of products that are summed in one go; adding such sums has a smaller error than one long sum
    soon, soon_at: where numbers begin that will be read next. Tiles of MOST_VECTORS vectors prefetch them, a line for
    each k. If there are more than LINES tiles, these are more than the next two panels: the next four, for example.
    requests: what each tile requests for later steps (requests.py), as indices in `soon`
    """
    panels, line, next_at = 1 if width <= panel_width(b) else 2, line_of(b), soon_at
    i = 0
    while i < rows:  # not a loop over a range with a step: a division for each tile would take as long as five products
        height, to, k = tile_rows(rows - i, panels), c_at + i * c_row, 0
        later, step = next_request(requests)
        while k < depth:
            deep, adds = min(kc, depth - k), accumulate or k > 0
            if a_step == 1:
                plane_tile(height, width, deep, adds, a, a_at + i * a_row + k, a_row, b, b_at + k * b_step, b_step,
                           b_panel, c, to, c_row, False, b, 0, 0, False, soon, next_at, line, later, step)  # fmt: skip
            else:
                plane_tile_side_by_side(height, width, deep, adds, a, a_at + i + k * a_step, a_step,
                                        b, b_at + k * b_step, b_step, b_panel, c, to, c_row, False, b, 0, 0,
                                        False, soon, next_at, line, later, step)  # fmt: skip
            next_at, later = next_at + deep * line, later + deep * step
            k += deep
        i += height
