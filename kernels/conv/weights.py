"""Transforms of weights into Winograd's planes, and of planes into the weight gradient, for each piece of a kernel.

forms.py explains pieces, and planes.py planes.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import apart_jit
from minidl.kernels.matmul.pack import pack_columns, pack_rows
from minidl.kernels.matmul.tile import lanes

from .forms import (
    Kernel,
    Phase,
    count_of_pieces,
    first_tap,
    gather_transform,
    planes_of,
    rows_and_columns,
    tile_of,
    weight_side,
    weight_transform,
)
from .planes import row_of


@apart_jit
def weight_to_planes(
    form: int, weight: ndarray, kernel: Kernel, phase: Phase, flip: bool, groups: int, group: int, piece: int,
    block: int, begin: int, stop: int, u: ndarray, plane: int, rows: int, row: int,
) -> None:  # fmt: skip
    """Write G g GT to the planes of u, for a piece of the kernel (forms.py), the outputs [begin, stop) of a group, and
    one vector of its input channels: vector number `block`. `begin` is a multiple of the panel width.

    A plane of u consists of panels (`rows`, panel width); the channels go to the rows `row`, row + 1, ... With `flip`
    (for dx), the kernel g is rotated by 180 degrees, has only the taps of a phase (forms.py), and input and output
    channels are exchanged.
    """
    high, wide, inner, total = weight.shape
    r, (top, left) = tile_of(form)[1], first_tap(form, kernel, piece)
    some_rows, some_columns = rows_and_columns(form, kernel, piece)
    incomplete = some_rows < r[0] or some_columns < r[1]
    vector, outer = lanes(weight), total // groups
    panel_columns, group_at = 2 * vector, group * outer
    channels = outer if flip else inner
    first = block * vector
    count = min(vector, channels - first)
    # (taps, channels, outputs), and one vector more; taps outside the kernel stay 0
    patch = np.zeros(r[0] * r[1] * vector * vector + vector, weight.dtype)
    flat, side = weight.reshape(-1), weight_side(form)
    for o in range(begin, stop, vector):
        through = flip or incomplete or o + vector > stop
        if through:
            some = min(vector, stop - o)
            for i in range(some_rows):
                for j in range(some_columns):  # outputs beyond `some` may have any values
                    part = patch[(i * r[1] + j) * vector * vector :]
                    if flip:
                        row_of_taps = phase[4] + phase[0] * (kernel[0] - 1 - top - i)
                        tap = phase[5] + phase[1] * (kernel[1] - 1 - left - j)
                        if row_of_taps < high and tap < wide:
                            corner = ((row_of_taps * wide + tap) * inner + o) * total + group_at + first
                            pack_columns(flat, corner, total, count, some, part, vector)
                    else:
                        tap = (top + i * kernel[2]) * wide + left + j * kernel[3]
                        pack_rows(flat, (tap * inner + first) * total + group_at + o, total, count, some, part, vector)
        for c in range(count):
            source, step, line = flat, inner * total * kernel[3], wide * inner * total * kernel[2]
            at = ((top * wide + left) * inner + first + c) * total + group_at + o
            if through:
                source, at, line, step = patch, c * vector, r[1] * vector * vector, vector * vector
            panel = (o - begin) // panel_columns * panel_columns
            to = panel * rows + (row + c) * panel_columns + o % panel_columns
            weight_transform(form, source, at, line, step, (0, r[0]), (0, r[1]), u, u, to, side * plane, plane)


@apart_jit
def weight_from_planes(
    form: int, kernel: Kernel, parts: int, du: ndarray, part: int, plane: int, c: int, dweight: ndarray
) -> None:
    """Compute dweight[:, :, c] = GT dU G, where dU is the sum of the partial sums, added in order.

    dU has a plane for each piece of the kernel (forms.py) and each position.
    """
    (_, wide, channels, outputs), (_, r, n) = dweight.shape, tile_of(form)
    vector, row = lanes(dweight), row_of(outputs)
    planes, step, flat = planes_of(form), channels * outputs, dweight.reshape(-1)
    patch = np.empty(r[0] * r[1] * vector, dweight.dtype)
    for piece in range(count_of_pieces(form, kernel)):
        for k in range(piece * planes, (piece + 1) * planes):
            total = du[k * plane + c * row : k * plane + c * row + outputs]
            for q in range(1, parts):
                other = du[q * part + k * plane + c * row : q * part + k * plane + c * row + outputs]
                for o in range(outputs):
                    total[o] += other[o]
        top, left = first_tap(form, kernel, piece)
        some_rows, some_columns = rows_and_columns(form, kernel, piece)
        through = outputs < vector or some_rows < r[0] or some_columns < r[1]
        for begin in range(0, max(outputs, vector), vector):
            o = max(0, min(begin, outputs - vector))
            target, at = flat, ((top * wide + left) * channels + c) * outputs + o
            line, tap = wide * step * kernel[2], step * kernel[3]
            if through:
                target, at, line, tap = patch, 0, r[1] * vector, vector
            gather_transform(form, du, piece * planes * plane + c * row + o, n[1] * plane, plane, (0, n[0]), (0, n[1]),
                             du, target, at, line, tap)  # fmt: skip
            if through:
                for i in range(some_rows):
                    for j in range(some_columns):
                        taps = dweight[top + i * kernel[2], left + j * kernel[3], c]
                        for p in range(min(vector, outputs)):
                            taps[o + p] = patch[(i * r[1] + j) * vector + p]
