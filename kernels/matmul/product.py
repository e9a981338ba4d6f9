"""The micro-kernel for matrix products: a tile with up to 12 rows at equal distances, and a sum over k only.

    c[c_at + i * c_row + j]  =  sum over k < depth of  a[a_at + i * a_row + k * a_step] * b[b_at + k * b_step + j]

If `accumulate`, the sum is added to c. One of a_row and a_step is 1: `a` is either a matrix with contiguous rows or one
whose rows lie side by side, as in a packed strip (pack.py). So the addresses of the rows for four successive k differ
by constants, which an instruction can contain. That leaves registers for 24 sums and for the rows' addresses. For its
24 multiply-adds the tile loads 14 times, and it branches once for four k: on an Intel Xeon, 95% of the multiply-add
rate. A tile like that of tile.py, with 16 sums and a branch for each k, reached 84%.

The last rows of a product have a lower tile: 8 or 4 rows. It may have missing rows. In a side-by-side `a`, they are any
numbers in memory; their sums are computed, and overwritten (`Emitter.write`).

The code around the loop over k matters: a loop over 32 products takes only as long as the code before and after it. So
there are no tables, and stores use masks only if a tile is not full. The bias and relu of a linear layer are applied
while the sums are in registers. If c is to be added, its lines are prefetched before the loop.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy import ndarray

from minidl.engine.jit import apart_jit

from .blocks import HEIGHTS, PRODUCT_MR
from .emitter import Emitter, Sums, Value, instructions


def with_bias_and_relu(e: Emitter, totals: Sums, bias: Value, biased: Value, relu: Value) -> Sums:
    """Return the sums plus bias in the first `biased` columns; if `relu`, at least 0."""
    masks = {v: e.mask(v, biased) for v in dict.fromkeys(v for _, v in totals)}
    biases = {  # -0 for no bias: adding -0 changes no bit
        v: e.builder.select(mask, e.load_masked(bias, v * e.lanes, mask), e.filled(-0.0)) for v, mask in masks.items()
    }
    least = e.builder.select(relu, e.filled(0.0), e.filled(-np.inf))
    return {(i, v): e.at_least(e.builder.fadd(total, biases[v]), least) for (i, v), total in totals.items()}


def _make_product_tile(side_by_side: bool) -> Any:
    """Return the tile for one of the two layouts of a:

    side_by_side    a[a_at + i + k * a_step]    packed strips, and transposed matrices
    otherwise       a[a_at + i * a_step + k]    rows of a matrix
    """

    @instructions
    def product_tile(
        e: Emitter, rows: Value, width: Value, depth: Value, accumulate: Value, a: Value, a_at: Value, a_step: Value,
        b: Value, b_at: Value, b_step: Value, c: Value, c_at: Value, c_row: Value,
        finish: Value, bias: Value, bias_at: Value, biased: Value, relu: Value,
    ) -> None:  # fmt: skip
        """Compute the tile above. If `finish`, add bias to the first `biased` columns and, if `relu`, apply relu."""
        a, b, c, bias = e.at(a, a_at), e.at(b, b_at), e.at(c, c_at), e.at(bias, bias_at)
        step_of_k = a_step if side_by_side else e.integer(1)

        def tile(height: int, vectors: int) -> None:
            numbers = e.row_numbers(rows, height)
            rows_of_c = [e.at(c, e.times(i, c_row)) for i in numbers]
            rows_of_a = [] if side_by_side else [e.in_register(e.at(a, e.times(i, a_step))) for i in numbers]
            with e.builder.if_then(accumulate):
                for row in rows_of_c:
                    for v in range(vectors):
                        e.prefetch(row, v * e.lanes, write=False)

            def add_product(sums: Sums, a_k: Value, b_k: Value) -> Sums:
                if side_by_side:
                    start = e.at(a, a_k)
                    pointers = [e.at(start, i) for i in range(height)]
                else:
                    pointers = [e.at(row, a_k) for row in rows_of_a]
                return e.rank_one(sums, pointers, e.columns(e.at(b, b_k), vectors))

            sums = e.unrolled(depth, [(0, step_of_k), (0, b_step)], e.zeros(height, vectors), add_product)
            totals = e.plus(sums, accumulate, rows_of_c, width)
            finished = partial(with_bias_and_relu, e, totals, bias, biased, relu)
            e.write(e.when(finish, finished, totals), rows_of_c, width)

        e.lowest(rows, HEIGHTS, lambda height: e.fewest_vectors(width, 2, partial(tile, height)))

    return product_tile


product_tile, product_tile_side_by_side = _make_product_tile(False), _make_product_tile(True)


@apart_jit
def product_panel(
    rows: int, width: int, depth: int, kc: int, accumulate: bool, a: ndarray, a_at: int, a_row: int, a_step: int,
    b: ndarray, b_at: int, b_step: int, c: ndarray, c_at: int, c_row: int,
) -> None:  # fmt: skip
    """Compute a column of tiles: any number of rows, up to panel_width(a) columns; a, b, c are vectors (one axis).

    a_row, a_step: the distances between rows and between successive k, one of which is 1
    kc: the number of products that are summed in one go; adding such sums has a smaller error than one long sum
    """
    for i in range(0, rows, PRODUCT_MR):
        height, to = min(PRODUCT_MR, rows - i), c_at + i * c_row
        for k in range(0, depth, kc):
            deep, adds = min(kc, depth - k), accumulate or k > 0
            if a_step == 1:
                product_tile(height, width, deep, adds, a, a_at + i * a_row + k, a_row, b, b_at + k * b_step, b_step,
                             c, to, c_row, False, b, 0, 0, False)  # fmt: skip
            else:
                product_tile_side_by_side(height, width, deep, adds, a, a_at + i + k * a_step, a_step,
                                          b, b_at + k * b_step, b_step, c, to, c_row, False, b, 0, 0,
                                          False)  # fmt: skip
