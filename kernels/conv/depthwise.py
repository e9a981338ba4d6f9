"""Depthwise convolution, and groups of 2, 4 or 8 channels: y and dx.

    out[pixel, c] = sum over taps and m < size of  source[pixel + tap, first(c) + m] * weight[tap, m, c]

where first(c) is the first channel of the group of c, and x and y have `size` channels in each group. Vectors extend
along the channels, across groups. Both operands of a multiplication are vectors, which are read where they are: images
are not copied (rectangles.py). In a vector of channels, an instruction copies channel m of each group to all lanes of
the group:

    size = 4, m = 1        a b c d   e f g h   ...   ->   b b b b   f f f f   ...

A tile computes neighbouring pixels of a rectangle, along its longer side, for two vectors of channels. All channels of
these pixels are computed before the next pixels, so memory is read and written from its beginning to its end.
Milliseconds on two threads of a Zen 4, before (with copies; * Winograd) and now:

    3x3, 37 images                 channels, groups     y              dx             dweight
    16 x 16                         64, 64               0.20, 0.10     0.13, 0.09     0.12, 0.10
     8 x  8                        256, 256              0.16, 0.10     0.16, 0.10     0.16, 0.14
     4 x  4                        512, 512              0.11, 0.06     0.13, 0.06     as before
    16 x 16, stride 2              128, 32               1.47, 0.14     1.35, 0.17     1.85, 0.15
    16 x 16, stride 2              128, 16               0.43, 0.36     0.70, 0.43     0.45, 0.37
    16 x 16                        128, 32               0.90*, 0.50    0.88*, 0.53    1.23*, 0.43
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy import ndarray

from minidl.engine.jit import REGISTERS, apart_jit, helper, parallel_jit, prange
from minidl.engine.team import thread_count
from minidl.kernels.matmul.blocks import LINE, aligned
from minidl.kernels.matmul.emitter import Emitter, Sums, Value, instructions
from minidl.kernels.matmul.tile import end_of_layer, lanes, whole_vectors
from minidl.kernels.norm.blocks import fetch_rows

from .blocks import clear
from .channels import channel_of_group, columns_within
from .geometry import Axis, Layer, axes_of, ceildiv, layer_of, passes_of
from .norms import Norms, add_rest, add_up, normalize
from .rectangles import lines_of_band, memory_of_band, rows_of_band, runs_of, tap_offsets
from .reference import Pair, Shape
from .rows import fill_end
from .sizes import NARROW, NR, SERIAL

HEIGHTS = (8, 6, 4, 2, 1) if REGISTERS == 32 else (4, 2, 1)  # pixels of a tile: two vectors of sums for each
FEW_HEIGHTS = HEIGHTS[0], 4, 1  # of a single vector, and of groups of several channels: fewer are compiled faster


@instructions
def _tile(
    e: Emitter, size: Value, rows: Value, taps: Value, at: Value, a: Value, a_offsets: Value, a_at: Value, a_row: Value,
    b: Value, b_offsets: Value, b_at: Value, b_step: Value, c: Value, c_at: Value, c_row: Value, width: Value,
    finish: Value, end: Value, end_step: Value, shortcut: Value, adds: Value,
) -> None:  # fmt: skip
    """Compute c[c_at + i * c_row + j] for i < rows <= HEIGHTS[0] and j < width, the sum over k < taps and m < size of

        a[a_at + i * a_row + a_offsets[at + k] + first(j) + m] * b[b_at + b_offsets[at + k] + m * b_step + j]

    width: two whole vectors, or at most one vector, of which only `width` numbers are read. taps: at least 1. If
    `finish`, apply the end of the layer (matmul/tile.py) from column b_at on; the shortcut has the layout of c.
    """
    a, b, c, shortcut, end = e.at(a, a_at), e.at(b, b_at), e.at(c, c_at), e.at(shortcut, c_at), e.at(end, b_at)
    a_offsets, b_offsets = e.at(a_offsets, at), e.at(b_offsets, at)

    def tile(channels: int, vectors: int, height: int) -> None:
        numbers = e.row_numbers(rows, height)
        rows_of_c = [e.at(c, e.times(i, c_row)) for i in numbers]
        rows_of_a = [e.at(a, e.times(i, a_row)) for i in numbers]
        e.prefetch_rows(rows_of_c, vectors)

        def add_products(sums: Sums, k: Value) -> Sums:
            start, offset = e.at(b, e.number(b_offsets, k)), e.number(a_offsets, k)
            weights = [columns_within(e, e.at(start, e.times(b_step, m)), vectors, width) for m in range(channels)]
            added = {}
            for i, row in enumerate(rows_of_a):
                for v, column in enumerate(columns_within(e, e.at(row, offset), vectors, width)):
                    total = sums[i, v]
                    for m in range(channels):
                        total = e.multiply_add(channel_of_group(e, column, m, channels), weights[m][v], total)
                    added[i, v] = total
            return added

        sums = e.loop(taps, [], e.zeros(height, vectors), add_products)
        others = [e.at(shortcut, e.times(i, c_row)) for i in numbers]
        e.write(end_of_layer(e, sums, width, finish, end, end_step, others, adds), rows_of_c, width)

    def heights(channels: int, vectors: int) -> None:
        e.lowest(rows, HEIGHTS if channels == 1 and vectors == 2 else FEW_HEIGHTS, partial(tile, channels, vectors))

    e.lowest(size, NARROW[::-1], lambda channels: e.fewest_vectors(width, 2, partial(heights, channels)))


@apart_jit
def _pass(
    task: int, tasks: int, layer: Layer, v: Axis, h: Axis, batch: int, source: ndarray, weight: ndarray, finish: bool,
    end: ndarray, shortcut: ndarray, band: ndarray, y: ndarray, norms: Norms,
) -> None:  # fmt: skip
    """Compute this task's bands of a pass. If `finish`, also apply the end of the layer. In `end`, zeros follow it.

    norms: with sums, only if there is a single pass. band: memory for the normalised pixels that a band reads
    """
    if v.pixels * h.pixels == 0:  # the image has fewer pixels than the stride
        return
    channels, rows, columns, out = layer.groups * layer.inner, runs_of(v), runs_of(h), y.reshape(-1)
    a_offsets, b_offsets = tap_offsets(layer, v, h, rows, columns)
    line, c_line, adds = h.source * channels, h.out * channels, shortcut.size > 0
    each, pair, end_step = rows_of_band(layer, v, h, batch, tasks), 2 * lanes(out), whole_vectors(channels, out)
    zeros = end[4 * end_step :]
    bands = ceildiv(v.pixels, each)
    start = task * batch * bands // tasks
    since = (start // bands * v.out + start % bands * each) * h.out
    for number in range(start, (task + 1) * batch * bands // tasks):
        image, begin = number // bands, number % bands * each
        pixels_of_x, above = source, image * v.source  # above: lines of pixels before this image
        if norms.before.size:
            low, high = lines_of_band(v, begin, min(v.pixels, begin + each))
            normalize(source, (above + low) * h.source, (above + high) * h.source, norms.before, band)
            pixels_of_x, above = band, -low
        for r in range(rows.shape[0]):
            top, bottom = max(begin, rows[r, 0]), min(begin + each, rows[r, 1])
            if top >= bottom:
                continue
            for q in range(columns.shape[0]):
                left, right = columns[q, 0], columns[q, 1]
                taps = (rows[r, 3] - rows[r, 2]) * (columns[q, 3] - columns[q, 2])
                table = (r * columns.shape[0] + q) * v.taps * h.taps
                at = (above + v.offset + top * v.step) * line + (h.offset + left * h.step) * channels
                to = (image * v.out + v.first + top * v.stride) * c_line + (h.first + left * h.stride) * channels
                # The steps from a line of pixels to the next one, and along a line
                lines, a_line, to_line = bottom - top, v.step * line, v.stride * c_line
                pixels, a_row, to_row = right - left, h.step * channels, h.stride * channels
                if lines > pixels:
                    lines, pixels, a_line, a_row, to_line, to_row = pixels, lines, a_row, a_line, to_row, to_line
                a, b = pixels_of_x, weight
                if taps == 0:  # a window outside the image or, for dx, a pixel between windows: one product, 0 * 0
                    a, b, at, a_line, a_row, taps, table = zeros, zeros, 0, 0, 0, 1, a_offsets.size - 1
                for i in range(lines):
                    for first in range(0, pixels, HEIGHTS[0]):
                        some, channel = min(HEIGHTS[0], pixels - first), 0
                        a_at, c_at = at + i * a_line + first * a_row, to + i * to_line + first * to_row
                        if to_row == channels:
                            fetch_rows(norms.x, c_at, some * channels)
                        while channel < channels:
                            width = pair if channels - channel >= pair else min(channels - channel, lanes(out))
                            _tile(layer.inner, some, taps, table, a, a_offsets, a_at + channel, a_row, b, b_offsets,
                                  channel, channels, out, c_at + channel, to_row, width, finish, end,
                                  end_step, shortcut, adds)  # fmt: skip
                            channel += width
        since = add_up(y, since, (image * v.out + min(v.pixels, begin + each)) * h.out, norms)


@apart_jit
def _task(
    task: int, tasks: int, source: ndarray, weight: ndarray, backward: bool, size: Pair, of_y: Pair, groups: int,
    stride: Pair, padding: Pair, dilation: Pair, finish: bool, end: ndarray, shortcut: ndarray,
    band: ndarray, out: ndarray, norms: Norms,
) -> None:  # fmt: skip
    """Compute this task's bands of all passes."""
    layer = layer_of(weight.shape, backward, groups, stride, padding, dilation)
    for remainder in range(passes_of(layer, backward)):
        v, h = axes_of(layer, backward, size, of_y, remainder, 1)
        _pass(task, tasks, layer, v, h, source.shape[0], source.reshape(-1), weight.reshape(-1), finish, end, shortcut,
              band, out, norms)  # fmt: skip


def scratch_size(w_shape: Shape) -> int:
    """Return the number of elements of convolve's scratch, without bands."""
    return int(4 * (w_shape[3] + NR) + LINE + (w_shape[0] * w_shape[1] + 1) * w_shape[2] * w_shape[3])


@apart_jit
def _transpose(weight: ndarray, turned: ndarray) -> None:
    """Transpose the weights (kh, kw, size, O) of each group; size = C / groups = O / groups."""
    taps, size, outputs = weight.shape[0] * weight.shape[1], weight.shape[2], weight.shape[3]
    numbers = weight.reshape(-1)
    for tap in range(taps):
        for k in range(size):
            for o in range(outputs):
                at, place = o % size, o // size * size
                turned[(tap * size + k) * outputs + o] = numbers[(tap * size + at) * outputs + place + k]


@parallel_jit
def _divide(
    tasks: int, source: ndarray, weight: ndarray, backward: bool, size: Pair, of_y: Pair, groups: int, stride: Pair,
    padding: Pair, dilation: Pair, finish: bool, end: ndarray, shortcut: ndarray, memory: ndarray, each: int,
    out: ndarray, norms: Norms,
) -> None:  # fmt: skip
    """Divide the bands among the threads. memory: `each` numbers for each of them"""
    for task in prange(tasks):  # task is unsigned
        own = np.int64(task) * each
        _task(np.int64(task), tasks, source, weight, backward, size, of_y, groups, stride, padding, dilation, finish,
              end, shortcut, memory[own : own + each], out, norms)  # fmt: skip


@helper
def convolve(
    source: ndarray, weight: ndarray, backward: bool, bias: ndarray, scale: ndarray, shift: ndarray,
    shortcut: ndarray, relu: bool, groups: int, stride: Pair, padding: Pair, dilation: Pair, scratch: ndarray,
    out: ndarray, norms: Norms,
) -> None:  # fmt: skip
    """Compute out = y from source = x or, if `backward`, out = dx from source = dy, as direct.py does.

    norms.before may be used for y if `normalizes` (rectangles.py) says so, with scratch for bands (`memory_of_bands`).
    """
    row, zeros = whole_vectors(weight.shape[3], out), weight.shape[2] * weight.shape[3]
    end, rest = aligned(scratch)[: 4 * row + zeros], aligned(scratch)[4 * row + zeros :]
    fill_end(bias, scale, shift, relu, 1, 1, end[: 4 * row])
    clear(end[4 * row :])
    finish, tasks, each = relu or bias.size + scale.size + shortcut.size > 0, thread_count(), 0
    size, of_y = (out.shape[1:3], source.shape[1:3]) if backward else (source.shape[1:3], out.shape[1:3])
    if backward and weight.shape[2] > 1:
        turned = rest[: weight.size]
        _transpose(weight, turned)
        weight = turned.reshape(weight.shape)
    if norms.before.size:
        rest = aligned(rest)
        each = memory_of_band(size, of_y, weight.shape, groups, stride, padding, dilation)
        tasks = min(tasks, rest.size // each)
    if source.shape[0] * size[0] * size[1] * weight.size <= SERIAL * stride[0] * stride[1]:
        # Without a parallel loop, no other thread has to wake up.
        _task(0, 1, source, weight, backward, size, of_y, groups, stride, padding, dilation, finish, end, shortcut,
              rest, out, norms)  # fmt: skip
    else:
        # np.int64: another type of integer would compile _task once more
        _divide(np.int64(tasks), source, weight, backward, size, of_y, groups, stride, padding, dilation, finish, end,
                shortcut, rest, each, out, norms)  # fmt: skip
    add_rest(out, norms)
