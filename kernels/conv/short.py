"""A tile for sums of few products, for Winograd's products of groups with few channels.

    c[c_at + i * c_row + j]  =  sum over k < depth of  a[a_at + i * a_row + k] * b[b_at + k * b_step + j]

In matmul/product.py a tile of 12 rows begins with 12 addresses and ends with 12 stores. For 6 products this takes
longer than the products do. Here b stays in registers, a vector for each k, and a row of the output needs one store.
The sums of successive rows do not depend on each other, so the core computes several rows at a time.
"""

from __future__ import annotations

from minidl.engine.jit import REGISTERS
from minidl.kernels.matmul.emitter import Emitter, Sums, Value, instructions

MOST_PRODUCTS = REGISTERS // 2  # in a sum: half of the registers hold b


@instructions
def short_tile(
    e: Emitter, rows: Value, depth: Value, a: Value, a_at: Value, a_row: Value, b: Value, b_at: Value, b_step: Value,
    c: Value, c_at: Value, c_row: Value, width: Value,
) -> None:  # fmt: skip
    """Compute `rows` rows, at least one, of sums of `depth` products, 1 to MOST_PRODUCTS; width: at most one vector."""
    b, mask = e.at(b, b_at), e.mask(0, width)

    def tile(products: int) -> None:
        rows_of_b = [e.load(b, e.times(b_step, k)) for k in range(products)]

        def row(_: Sums, number: Value, a_i: Value, c_i: Value) -> Sums:
            total = e.filled(0.0)
            for k, row_of_b in enumerate(rows_of_b):
                total = e.multiply_add(e.broadcast(e.number(e.at(a, a_i), k)), row_of_b, total)
            e.store_masked(total, c, c_i, mask)
            return {}

        e.loop(rows, [(a_at, a_row), (c_at, c_row)], {}, row)

    e.lowest(depth, range(MOST_PRODUCTS, 0, -1), tile)
