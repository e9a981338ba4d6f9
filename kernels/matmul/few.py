"""The micro-kernel for products of 1 to 4 rows: a prediction of a few images. The limit is the speed of reading b.

    c[c_at + i * c_row + j]  =  sum over k < depth of  a[a_at + i * a_row + k * a_step] * b[b_at + k * b_step + j]

Each number of b is used only `rows` times. The tile of product.py is not made for that: it multiplies 4 rows, even if
some of them are missing, and reads 128 or 256 bytes of each row of b. Then the next row is often on another page of
memory. Here a tile has exactly as many rows as the product, and is as wide as the registers allow: 1 KB of a row of b
for one row of a, 256 bytes for four rows. b is read in place, or from packed panels at a distance of b_panel numbers.
(In the formula, b_panel is the width of a panel.) Each tile prefetches the row of b that it will read AHEAD rows later.

The sum is computed in the order of k, as in product.py, so the bits are the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from numpy import ndarray

from minidl.engine.jit import apart_jit

from .blocks import few_panels
from .emitter import Emitter, Sums, Value, instructions
from .product import with_bias_and_relu

AHEAD = 8  # rows of b: a longer distance would evict rows from L1 before they are read


def _make_few_tile(rows: int) -> Any:
    vectors = 2 * few_panels(rows)

    @instructions
    def few_tile(
        e: Emitter, depth: Value, accumulate: Value, a: Value, a_at: Value, a_row: Value, a_step: Value,
        b: Value, b_at: Value, b_step: Value, b_panel: Value, c: Value, c_at: Value, c_row: Value,
        finish: Value, bias: Value, bias_at: Value, biased: Value, relu: Value,
    ) -> None:  # fmt: skip
        """Compute a tile of this many rows. If `finish`, add bias to the first `biased` columns and, if `relu`, apply
        relu. If `accumulate`, the sum is added to c before."""
        a, b, c, bias = e.at(a, a_at), e.at(b, b_at), e.at(c, c_at), e.at(bias, bias_at)
        rows_of_a, rows_of_c = ([e.at(x, e.times(row, i)) for i in range(rows)] for x, row in ((a, a_row), (c, c_row)))

        def add_product(sums: Sums, _: Value, a_k: Value, b_k: Value) -> Sums:
            panels = [e.at(e.at(b, b_k), e.times(b_panel, number)) for number in range(vectors // 2)]
            for panel in panels:
                soon = e.at(panel, e.times(b_step, AHEAD))
                for v in range(2):
                    e.prefetch(soon, v * e.lanes, level=1)
            columns = [column for panel in panels for column in e.columns(panel, 2)]
            return e.rank_one(sums, (e.at(start, a_k) for start in rows_of_a), columns)

        sums = e.loop(depth, [(0, a_step), (0, b_step)], e.zeros(rows, vectors), add_product)
        width = e.integer(vectors * e.lanes)
        totals = e.plus(sums, accumulate, rows_of_c, width)
        finished = partial(with_bias_and_relu, e, totals, bias, biased, relu)
        e.write(e.when(finish, finished, totals), rows_of_c, width)

    return few_tile


_one, _two, _three, _four = (_make_few_tile(rows) for rows in (1, 2, 3, 4))


@apart_jit
def few_tile(
    rows: int, depth: int, accumulate: bool, a: ndarray, a_at: int, a_row: int, a_step: int,
    b: ndarray, b_at: int, b_step: int, b_panel: int, c: ndarray, c_at: int, c_row: int,
    finish: bool, bias: ndarray, bias_at: int, biased: int, relu: bool,
) -> None:  # fmt: skip
    """Compute a tile of 1 to 4 rows and few_panels(rows) panels; a, b, c are vectors (one axis)."""
    if rows == 1:
        _one(depth, accumulate, a, a_at, a_row, a_step, b, b_at, b_step, b_panel, c, c_at, c_row,
             finish, bias, bias_at, biased, relu)  # fmt: skip
    elif rows == 2:
        _two(depth, accumulate, a, a_at, a_row, a_step, b, b_at, b_step, b_panel, c, c_at, c_row,
             finish, bias, bias_at, biased, relu)  # fmt: skip
    elif rows == 3:
        _three(depth, accumulate, a, a_at, a_row, a_step, b, b_at, b_step, b_panel, c, c_at, c_row,
               finish, bias, bias_at, biased, relu)  # fmt: skip
    else:
        _four(depth, accumulate, a, a_at, a_row, a_step, b, b_at, b_step, b_panel, c, c_at, c_row,
              finish, bias, bias_at, biased, relu)  # fmt: skip
