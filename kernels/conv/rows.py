"""The end of a layer (bias, scale, shift, shortcut, relu), applied to rows of sums after the micro-kernel.

A row has at most MOST_VECTORS vectors, of which the last may be partial.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import jit
from minidl.kernels.matmul.emitter import Emitter, Sums, Value, instructions
from minidl.kernels.matmul.tile import MOST_VECTORS, panel_width


@instructions
def _end(
    e: Emitter, y: Value, at: Value, end: Value, end_at: Value, step: Value, shortcut: Value, adds: Value, width: Value
) -> None:
    """Compute y = max((y + end[0]) * end[1] + end[2] + shortcut, end[3]), each step rounded; NaN stays NaN.

    Row end[i] begins at index end_at + i * step. The shortcut has the layout of y. If there is none (`adds` is false),
    end[4], a row of zeros, is added instead. Beyond `width`, y and the shortcut are not accessed.
    """
    b, row = e.builder, e.at(y, at)
    ends = [e.at(e.at(end, end_at), e.times(step, i)) for i in range(5)]
    other = b.select(adds, e.at(shortcut, at), ends[4])

    def new(first: int, x: Value, other: Value) -> Value:
        bias, scale, shift, least = (e.load(start, first) for start in ends[:4])
        return e.at_least(b.fadd(e.scale_shift(x, bias, scale, shift), other), least)

    for v in range(MOST_VECTORS):
        first = v * e.lanes
        with b.if_else(b.icmp_signed(">=", width, e.integer(first + e.lanes))) as (whole, part):
            with whole:
                e.store(new(first, e.load(row, first), e.load(other, first)), row, first)
            with part, b.if_then(b.icmp_signed(">", width, e.integer(first))):
                mask = e.mask(v, width)
                x, y = (e.load_masked(start, first, mask) for start in (row, other))
                e.store_masked(new(first, x, y), row, first, mask)


@jit
def fill_end(bias: ndarray, scale: ndarray, shift: ndarray, relu: bool, groups: int, block: int, end: ndarray) -> None:
    """Fill the five rows of end (5, groups, columns) for finish_rows: bias, scale, shift, floor, zeros.

    bias, scale, shift have shape (O,) or size 0. A missing bias or shift is 0, a missing scale is 1. The floor, the
    least value of an output, is 0 with relu and -inf without. columns: `block` * (the outputs of a group), padded.
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


@instructions
def _copy_lanes(
    e: Emitter, rows: Value, sums: Value, sums_at: Value, step: Value, y: Value, y_rows: Value, at: Value, width: Value
) -> None:  # fmt: skip
    """Copy y[at + y_rows[r] + j] = sums[sums_at + r * step + j] for r < rows and j < width.

    There is at least one row, and `width` is at most one vector.
    """
    y, mask = e.at(y, at), e.mask(0, width)

    def copy_row(_: Sums, r: Value, start: Value) -> Sums:
        e.store_masked(e.load(e.at(sums, start), 0), e.at(y, e.number(y_rows, r)), 0, mask)
        return {}

    e.loop(rows, [(sums_at, step)], {}, copy_row)


@jit
def spread_rows(sums: ndarray, sums_at: int, y: ndarray, rows: ndarray, at: int, width: int) -> None:
    """Copy y[at + rows[r] + j] = sums[sums_at + r * panel_width + j] for all r and j < width, at most one vector."""
    _copy_lanes(rows.size, sums, sums_at, panel_width(sums), y, rows, at, width)


@jit
def finish_rows(y: ndarray, rows: ndarray, at: int, width: int, end: ndarray, end_at: int, shortcut: ndarray) -> None:
    """Apply the end of a layer to y[at + rows[r] + j] for all r and all j < width. fill_end fills `end`."""
    for r in range(rows.size):
        _end(y, at + rows[r], end, end_at, end.size // 5, shortcut, shortcut.size > 0, width)
