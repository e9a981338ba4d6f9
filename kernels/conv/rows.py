"""What is done to rows of sums after the micro-kernel: the end of a layer.

A row is at most panel_width numbers: one or two vectors, the second or both of them only in part.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy import ndarray

from minidl.engine.jit import jit
from minidl.kernels.matmul.tile import _Tile


class _Row(_Tile):
    """Its instructions, one vector at a time; loads, stores and masks are the tile's."""

    def __init__(self, context: Any, builder: Any, array: Any, width: Any) -> None:
        self.begin(context, builder, array.dtype)
        self.width = width

    def update(self, row: Any, other: Any, new: Any) -> Any:
        """row[j] = new(v, row[j], other[j]) for the one or two vectors of a row; nothing beyond is touched."""
        b = self.b
        for v in range(2):
            with b.if_else(b.icmp_signed(">=", self.width, self.constant((v + 1) * self.lanes))) as (whole, part):
                with whole:
                    pair = (self.load(self.column(place, v)) for place in (row, other))
                    b.store(new(v, *pair), self.column(row, v), align=self.bytes)
                with part, b.if_then(b.icmp_signed(">", self.width, self.constant(v * self.lanes))):
                    mask = self.mask(v, self.width)
                    pair = (self.load_masked(self.column(place, v), mask) for place in (row, other))
                    self.store_masked(new(v, *pair), self.column(row, v), mask)
        return ir.Constant(ir.IntType(8).as_pointer(), None)


def _place(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [at])


@intrinsic
def _end(
    typing: Any, y: Any, at: Any, end: Any, end_at: Any, step: Any, shortcut: Any, adds: Any, width: Any
) -> Any:
    """y = max((y + end[0]) end[1] + end[2] + shortcut, end[3]), each rounded; NaN stays.

    end[i] begins at end_at + i step; shortcut lies as y does; end[4] stands for one that there is not.
    """

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        row = _Row(context, b, y, arguments[7])
        places, place = [], _place(context, b, end, *arguments[2:4])
        for _ in range(5):
            places.append(place)
            place = b.gep(place, [arguments[4]])

        other = b.select(arguments[6], _place(context, b, shortcut, arguments[5], arguments[1]), places[4])

        def new(v: int, x: Any, other: Any) -> Any:
            bias, scale, shift, least = (row.load(row.column(p, v)) for p in places[:4])
            x = b.fadd(b.fadd(b.fmul(b.fadd(x, bias), scale), shift), other)
            return b.select(b.fcmp_ordered("<", x, least), least, x)

        return row.update(_place(context, b, y, *arguments[:2]), other, new)

    size = types.int64
    return types.void(y, size, end, size, size, shortcut, types.boolean, size), generate


@jit
def fill_end(
    bias: ndarray, scale: ndarray, shift: ndarray, relu: bool, groups: int, block: int, end: ndarray
) -> None:
    """end (5, groups, columns): what finish_rows wants for (y + bias) scale + shift and relu, 0 and 1 where unwanted.

    bias, scale, shift (O,) or of size 0; columns: the outputs of a group for each of `block` pixels, and what fills up
    the last panel.
    """
    columns = end.size // 5 // groups
    outputs = max(bias.size, scale.size) // groups
    for i in range(end.size):
        end[i] = 1 if i // (groups * columns) == 1 else 0
        if i // (groups * columns) == 3 and not relu:
            end[i] = -np.inf
    for g in range(groups):
        for j in range(block * outputs):
            at, o = g * columns + j, g * outputs + j % outputs
            if bias.size:
                end[at] = bias[o]
            if scale.size:
                end[groups * columns + at] = scale[o]
                end[2 * groups * columns + at] = shift[o]


@jit
def finish_rows(
    y: ndarray, rows: ndarray, at: int, width: int, end: ndarray, end_at: int, shortcut: ndarray
) -> None:
    """The end of a layer, for `width` outputs of the pixels at `rows`; end as fill_end left it."""
    for r in range(rows.size):
        _end(y, at + rows[r], end, end_at, end.size // 5, shortcut, shortcut.size > 0, width)
