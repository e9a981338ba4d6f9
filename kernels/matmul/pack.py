"""Panels of b, copied so that the micro-kernel reads them from beginning to end.

A panel is (depth, panel width): what the tile needs of b for one k lies side by side, and k follows k. Where b lies in
rows already (`nn`, `tn`) this is a copy of two vectors for each k. Where it is transposed (`nt`) a square of `lanes` x
`lanes` numbers at a time is turned in registers:

    A B C D      A B|C D      A E C G      A E I M
    E F G H      E F|G H      B F D H      B F J N         4 lanes: swap the off-diagonal halves of neighbouring
    I J K L      ---+---      I M K O      C G K O         rows in pairs (1 apart), then of rows 2 apart; 16 lanes
    M N O P      I J|K L      J N L P      D H L P         do it 1, 2, 4 and 8 apart (Eklundh 1972)

Columns beyond the width that is wanted hold anything: the tile does not store them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numpy import ndarray

from minidl.engine.jit import VECTOR_BYTES, apart_jit

from .tile import intrinsic, lanes, panel_width


@intrinsic
def _transpose(typing: Any, source: Any, at: Any, step: Any, rows: Any, target: Any, to: Any, width: Any) -> Any:
    """target[to + j width + i] = source[at + min(i, rows - 1) step + j]  for i, j < lanes"""
    size = types.int64
    signature = types.void(source, size, size, size, target, size, size)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        array = signature.args[0]
        count = VECTOR_BYTES * 8 // array.dtype.bitwidth
        vector = ir.VectorType(context.get_data_type(array.dtype), count)
        aligned = array.dtype.bitwidth // 8
        index = ir.IntType(64)
        _, at, step, rows, _, to, width = arguments

        def address(i: int, start: Any, distance: Any) -> Any:
            data = context.make_array(array)(context, b, arguments[i]).data
            return b.bitcast(b.gep(data, [b.add(start, distance)]), vector.as_pointer())

        last = b.sub(rows, index(1))
        lines = []
        for i in range(count):
            row = b.select(b.icmp_signed("<", index(i), last), index(i), last)
            lines.append(b.load(address(0, at, b.mul(row, step)), align=aligned))
        apart = 1
        while apart < count:
            for i in range(count):
                if not i & apart:
                    x, y = lines[i], lines[i + apart]
                    upper = [count + j - apart if j & apart else j for j in range(count)]
                    lower = [count + j if j & apart else j + apart for j in range(count)]
                    kind = ir.VectorType(ir.IntType(32), count)
                    lines[i] = b.shuffle_vector(x, y, ir.Constant(kind, upper))
                    lines[i + apart] = b.shuffle_vector(x, y, ir.Constant(kind, lower))
            apart *= 2
        for j, line in enumerate(lines):
            b.store(line, address(4, to, b.mul(index(j), width)), align=aligned)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    return signature, generate


@intrinsic
def _copy(typing: Any, source: Any, at: Any, target: Any, to: Any) -> Any:
    """target[to + j] = source[at + j]  for j < lanes"""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        array = signature.args[0]
        number = array.dtype.bitwidth // 8
        vector = ir.VectorType(context.get_data_type(array.dtype), VECTOR_BYTES // number).as_pointer()
        source, target = (
            b.bitcast(b.gep(context.make_array(array)(context, b, arguments[i]).data, [arguments[i + 1]]), vector)
            for i in (0, 2)
        )
        b.store(b.load(source, align=number), target, align=number)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    return types.void(source, types.int64, target, types.int64), generate


@apart_jit
def pack_rows(b: ndarray, at: int, step: int, depth: int, width: int, packed: ndarray) -> None:
    """packed (depth, panel width): number (k, j < width) is b[at + k step + j]"""
    columns = panel_width(b)
    inside = max(0, min(depth, (b.size - at - columns) // step + 1))  # k's whose two vectors end within b
    for k in range(inside):
        _copy(b, at + k * step, packed, k * columns)
        if width > lanes(b):
            _copy(b, at + k * step + lanes(b), packed, k * columns + lanes(b))
    for k in range(inside, depth):
        for j in range(width):
            packed[k * columns + j] = b[at + k * step + j]


@apart_jit
def pack_columns(b: ndarray, at: int, column: int, depth: int, width: int, packed: ndarray) -> None:
    """packed (depth, panel width): number (k, j < width) is b[at + k + j column].

    Whole squares are turned, so packed has room for a depth rounded up to a multiple of `lanes`.
    """
    columns, side = panel_width(b), lanes(b)
    for left in range(0, width, side):
        count = min(side, width - left)
        for k in range(0, depth, side):
            corner = at + left * column + k
            if corner + (count - 1) * column + side <= b.size:
                _transpose(b, corner, column, count, packed, k * columns + left, columns)
            else:  # the last row of the square would end beyond b
                for i in range(k, min(k + side, depth)):
                    for j in range(left, left + count):
                        packed[i * columns + j] = b[at + i + j * column]
