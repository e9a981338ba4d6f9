"""The end of a layer (bias, scale, shift, shortcut, relu), and rows of sums that go to separate places in y."""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import helper
from minidl.kernels.matmul.emitter import Emitter, Sums, Value, instructions
from minidl.kernels.matmul.tile import end_of_layer, panel_width


@helper
def fill_end(bias: ndarray, scale: ndarray, shift: ndarray, relu: bool, groups: int, block: int, end: ndarray) -> None:
    """Fill the four rows of end (4, groups, columns) for end_of_layer: bias, scale, shift, floor.

    bias, scale, shift have shape (O,) or size 0. A missing bias or shift is 0, a missing scale is 1. The floor, the
    least value of an output, is 0 with relu and -inf without. columns: `block` * (the outputs of a group), padded.
    """
    columns = end.size // 4 // groups
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
    e: Emitter, rows: Value, sums: Value, sums_at: Value, step: Value, y: Value, y_rows: Value, at: Value, width: Value,
    finish: Value, end: Value, end_at: Value, end_step: Value, shortcut: Value, adds: Value,
) -> None:  # fmt: skip
    """Copy y[at + y_rows[r] + j] = sums[sums_at + r * step + j] for r < rows, at least one, and j < width.

    width: at most one vector. If `finish`, apply the end of the layer (matmul/tile.py); the shortcut has y's layout.
    """
    y, shortcut, end, mask = e.at(y, at), e.at(shortcut, at), e.at(end, end_at), e.mask(0, width)

    def copy_row(_: Sums, r: Value, start: Value) -> Sums:
        place = e.number(y_rows, r)
        row = {(0, 0): e.load(e.at(sums, start), 0)}
        ended = end_of_layer(e, row, width, finish, end, end_step, [e.at(shortcut, place)], adds)
        e.store_masked(ended[0, 0], e.at(y, place), 0, mask)
        return {}

    e.loop(rows, [(sums_at, step)], {}, copy_row)


@helper
def spread_rows(
    sums: ndarray, sums_at: int, y: ndarray, rows: ndarray, at: int, width: int, finish: bool, end: ndarray,
    end_at: int, shortcut: ndarray,
) -> None:  # fmt: skip
    """Copy y[at + rows[r] + j] = sums[sums_at + r * panel_width + j] for all r and j < width, at most one vector.

    If `finish`, apply the end of the layer, which fill_end has written to `end`.
    """
    _copy_lanes(rows.size, sums, sums_at, panel_width(sums), y, rows, at, width, finish, end, end_at, end.size // 4,
                shortcut, shortcut.size > 0)  # fmt: skip
