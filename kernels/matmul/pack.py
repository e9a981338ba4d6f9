"""Panels of b and strips of a, copied so that the micro-kernel reads them from beginning to end.

A panel has the shape (depth, panel width): its row k contains the numbers of b that a tile needs for this k. A thread
copies the two panels of a pair side by side: a row contains the numbers of both. If b is not transposed (`nn`, `tn`),
whole vectors of `lanes` numbers are copied for each k, unless a tile copies them (product.py). If b is transposed
(`nt`), squares of `lanes` x `lanes` numbers are transposed in registers, one square at a time:

    A B|C D      A E|C G      A E I M      With 4 lanes, this takes two steps. The first step transposes each square of
    E F|G H      B F|D H      B F J N      2 x 2 numbers: it combines rows at a distance of 1. The second step swaps the
    ---+---      ---+---                   upper right square and the lower left square: it combines rows at a distance
    I J|K L      I M|K O      C G K O      of 2. With 16 lanes, there are four steps, and the distances are 1, 2, 4 and
    M N|O P      J N|L P      D H L P      8 (Eklundh 1972).

A strip of a is packed in the same way: its rows are the columns of a panel (`pitch` is the width of the panel or pair,
or the number of rows of the strip). Columns beyond the requested width hold arbitrary numbers: the tile does not store
their sums.
"""

from __future__ import annotations

from llvmlite import ir
from numpy import ndarray

from minidl.engine.jit import apart_jit

from .blocks import PRODUCT_MR
from .emitter import Emitter, Value, instructions
from .operands import Left
from .tile import lanes


@instructions
def transpose_square(
    e: Emitter, source: Value, at: Value, step: Value, rows: Value, target: Value, to: Value, width: Value
) -> None:
    """target[to + j * width + i] = source[at + min(i, rows - 1) * step + j]  for i, j < lanes"""
    source, target, count = e.at(source, at), e.at(target, to), e.lanes
    lines = [e.load(source, e.times(row, step)) for row in e.row_numbers(rows, count)]
    kind = ir.VectorType(ir.IntType(32), count)
    apart = 1
    while apart < count:
        upper = [count + j - apart if j & apart else j for j in range(count)]
        lower = [count + j if j & apart else j + apart for j in range(count)]
        for i in range(count):
            if not i & apart:
                x, y = lines[i], lines[i + apart]
                lines[i], lines[i + apart] = (e.builder.shuffle_vector(x, y, kind(half)) for half in (upper, lower))
        apart *= 2
    for j, line in enumerate(lines):
        e.store(line, target, e.times(width, j))


@instructions
def _copy(e: Emitter, source: Value, at: Value, target: Value, to: Value) -> None:
    """target[to + j] = source[at + j]  for j < lanes"""
    e.store(e.load(source, at), target, to)


@apart_jit
def pack_rows(b: ndarray, at: int, step: int, depth: int, width: int, packed: ndarray, pitch: int) -> None:
    """Pack a panel whose rows are contiguous: packed[k * pitch + j] = b[at + k * step + j] for j < width <= pitch.

    `packed` is a vector. Up to `lanes` numbers after the panel get any value.
    """
    side = lanes(b)
    inside = max(0, min(depth, (b.size - at - (width + side - 1) // side * side) // step + 1))
    for k in range(inside):  # rows whose vectors end within b
        for j in range(0, width, side):  # a vector may reach into the next row, which is written later
            _copy(b, at + k * step + j, packed, k * pitch + j)
    for k in range(inside, depth):
        for j in range(width):
            packed[k * pitch + j] = b[at + k * step + j]


@apart_jit
def pack_columns(b: ndarray, at: int, column: int, depth: int, width: int, packed: ndarray, pitch: int) -> None:
    """Pack a panel of a transposed b: packed[k * pitch + j] = b[at + k + j * column] for j < width <= pitch.

    `packed` is a vector. It must have space for a depth that is rounded up to a multiple of `lanes`, and for one vector
    more, because whole squares are transposed. Columns from `width` to `pitch` get any value.
    """
    side = lanes(b)
    for left in range((width - 1) // side * side, -1, -side):  # a square may reach into rows that are written later
        count = min(side, width - left)
        for k in range(0, depth, side):
            corner = at + left * column + k
            if corner + (count - 1) * column + side <= b.size:
                transpose_square(b, corner, column, count, packed, k * pitch + left, pitch)
            else:  # the last row of the square ends beyond b
                for i in range(k, min(k + side, depth)):
                    for j in range(left, left + count):
                        packed[i * pitch + j] = b[at + i + j * column]


@apart_jit
def pack_strips(a: Left, at: int, depth: int, rows: int, packed: ndarray) -> None:
    """Copy strips of PRODUCT_MR rows of a transposed a, from the number `at` on; the strips begin with row 0, 12, ... :

    packed[first * depth + k * PRODUCT_MR + i] = a[at + first + i + k * step]

    Missing rows of the last strip get any value.
    """
    for first in range(0, rows, PRODUCT_MR):
        some, strip = min(PRODUCT_MR, rows - first), packed[first * depth :]
        pack_rows(a.numbers, at + first, a.step, depth, some, strip, PRODUCT_MR)
