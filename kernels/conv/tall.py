"""A tile of 2 * MR rows (16 or 12) and one vector of columns, for Winograd's products with few outputs (one vector).

With one vector of columns, the tile of matmul/product.py has 12 accumulators, and keeps the address of each row in a
register. Here the distance between rows is known at compile time, so one address is enough for 16 rows.
"""

from __future__ import annotations

from typing import Any

from minidl.kernels.matmul.blocks import MR
from minidl.kernels.matmul.emitter import Emitter, Sums, Value, instructions

TALL_MR = 2 * MR  # rows of this tile


def _make_tall_tile(side_by_side: bool) -> Any:
    """Return the tile for rows of `a` at a distance of one number (if side_by_side) or one vector (otherwise)."""

    @instructions
    def tall_tile(
        e: Emitter, depth: Value, accumulate: Value, a: Value, a_at: Value, a_step: Value,
        b: Value, b_at: Value, b_step: Value, c: Value, c_at: Value, c_row: Value,
        soon: Value, later_at: Value, later_step: Value,
    ) -> None:  # fmt: skip
        """Compute a tile of sums over k, and store it in c or, if `accumulate`, add it to c.

        c[c_at + i * c_row + j] = sum over k of a[a_at + i * distance + k * a_step] * b[b_at + k * b_step + j]

        For each k, request soon[later_at + k * later_step] (matmul/requests.py).
        """
        a, b, c = e.at(a, a_at), e.at(b, b_at), e.at(c, c_at)
        later = e.in_register(e.at(soon, later_at))
        distance = 1 if side_by_side else e.lanes
        rows_of_c = [e.at(c, e.times(c_row, i)) for i in range(TALL_MR)]

        def add_product(sums: Sums, _: Value, a_k: Value, b_k: Value, later_k: Value) -> Sums:
            e.prefetch(later, later_k)
            numbers = (e.at(e.at(a, a_k), i * distance) for i in range(TALL_MR))
            return e.rank_one(sums, numbers, e.columns(e.at(b, b_k), 1))

        sums = e.loop(depth, [(0, a_step), (0, b_step), (0, later_step)], e.zeros(TALL_MR, 1), add_product)
        width = e.integer(e.lanes)
        e.write(e.plus(sums, accumulate, rows_of_c, width), rows_of_c, width)

    return tall_tile


tall_tile, tall_tile_side_by_side = _make_tall_tile(False), _make_tall_tile(True)
