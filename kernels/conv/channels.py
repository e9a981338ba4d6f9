"""The tile for groups with few output channels (depthwise: one), where a vector extends across groups.

    c[c_rows[i] + j]  =  sum over k of   a[a_rows[i] + a_offsets[k] + j]  *  b[k * b_step + j]

matmul/tile.py explains the arguments. Lane j is an output channel. Each lane needs its own number of a, so both
operands of a multiplication are vectors, and each multiply-add needs a load. In the micro-kernel of matmul/tile.py, all
lanes use the same number of a: ten loads are enough for sixteen multiply-adds (with 32 registers).
"""

from __future__ import annotations

from llvmlite import ir
from numpy import ndarray

from minidl.engine.jit import REGISTERS, apart_jit, helper
from minidl.kernels.matmul.emitter import Emitter, Sums, Value, instructions
from minidl.kernels.matmul.tile import end_of_layer, lanes

MR = 9  # rows of this tile: the weight gradient of a 3 x 3 kernel has nine


def columns_within(e: Emitter, start: Value, vectors: int, width: Value) -> list[Value]:
    """Return two vectors of numbers from start[0] on or, if `vectors` is 1, the first `width` numbers of a vector."""
    return e.columns(start, 2) if vectors == 2 else [e.load_masked(start, 0, e.mask(0, width))]


def channel_of_group(e: Emitter, vector: Value, m: int, size: int) -> Value:
    """Return the vector whose lanes all hold channel m of their own group; a group has `size` channels."""
    if size == 1:
        return vector
    lanes_of = ir.Constant(ir.VectorType(ir.IntType(32), e.lanes), [lane // size * size + m for lane in range(e.lanes)])
    return e.builder.shuffle_vector(vector, vector, lanes_of)


@instructions
def _tile(
    e: Emitter, rows: Value, depth: Value, accumulate: Value, a: Value, a_offsets: Value, a_rows: Value, a_at: Value,
    b: Value, b_at: Value, b_step: Value, c: Value, c_rows: Value, c_at: Value, width: Value,
    finish: Value, end: Value, end_at: Value, end_step: Value, shortcut: Value, adds: Value,
) -> None:  # fmt: skip
    a, b, c, shortcut = e.at(a, a_at), e.at(b, b_at), e.at(c, c_at), e.at(shortcut, c_at)

    def tile(vectors: int) -> None:
        numbers = e.row_numbers(rows, MR)
        rows_of_c = [e.at(c, e.number(c_rows, i)) for i in numbers]
        rows_of_a = [e.at(a, e.number(a_rows, i)) for i in numbers]
        e.prefetch_rows(rows_of_c, vectors)

        def add_products(sums: Sums, k: Value, b_k: Value) -> Sums:
            weights, at = e.columns(e.at(b, b_k), vectors), e.number(a_offsets, k)
            return {
                (i, v): e.multiply_add(e.load(e.at(rows_of_a[i], at), v * e.lanes), weights[v], total)
                for (i, v), total in sums.items()
            }

        sums = e.loop(depth, [(0, b_step)], e.zeros(MR, vectors), add_products)
        totals = e.plus(sums, accumulate, rows_of_c, width)
        others = [e.at(shortcut, e.number(c_rows, i)) for i in numbers]
        e.write(end_of_layer(e, totals, width, finish, e.at(end, end_at), end_step, others, adds), rows_of_c, width)

    e.fewest_vectors(width, 2, tile)


@helper
def channel_width(array: ndarray) -> int:
    """Return how many channels a tile has: two vectors if there are enough registers for their sums, else one."""
    return 2 * lanes(array) if REGISTERS == 32 else lanes(array)


@apart_jit
def channel_panel(
    rows: int, depth: int, accumulate: bool, a: ndarray, a_offsets: ndarray, a_rows: ndarray, a_at: int,
    b: ndarray, b_at: int, b_step: int, c: ndarray, c_rows: ndarray, c_at: int, width: int,
    finish: bool, end: ndarray, end_at: int, shortcut: ndarray,
) -> None:  # fmt: skip
    """Compute a column of tiles: any number of rows, up to channel_width channels.

    In a and b, channel_width numbers must be readable for each k. The arguments are those of matmul/tile.py's
    panel.
    """
    for i in range(0, rows, MR):
        _tile(min(MR, rows - i), depth, accumulate, a, a_offsets, a_rows[i:], a_at, b, b_at, b_step,
              c, c_rows[i:], c_at, width, finish, end, end_at, end.size // 4, shortcut, shortcut.size > 0)  # fmt: skip
