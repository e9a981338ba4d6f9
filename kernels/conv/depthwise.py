"""Depthwise convolution: each output channel reads one channel of x.

    out[pixel, c] = sum over taps of source[pixel + tap, c] * weight[tap, c]

Vectors extend along the channels. Both operands of a multiplication are vectors, read where they are: neither weights
nor images are copied. So that no sum reads beyond the image, an axis is divided into runs: outputs that read the same
taps (geometry.py explains a pass and its axes). With 3 taps and padding 1, there are three runs on each axis:

    row 0           taps 1, 2
    rows 1 ... -2   taps 0, 1, 2       nine rectangles of pixels, each with one list of taps
    last row        taps 0, 1

y and dx: a tile computes neighbouring pixels of a rectangle, along its longer side, for two vectors of channels. All
channels of these pixels are computed before the next pixels, so memory is read and written from its beginning to its
end. Milliseconds on two threads of a Zen 4, before (channels.py, which reads a copy with zeros around it) and now:

    3x3, 37 images    16 x 16,  64 channels     y 0.20, 0.10    dx 0.13, 0.09    dweight 0.12, 0.10
                       8 x  8, 256 channels       0.16, 0.10       0.16, 0.10            0.16, 0.14
                       4 x  4, 512 channels       0.11, 0.06       0.13, 0.06
    7x7, 37 images    16 x 16,  64 channels       0.45, 0.39       0.46, 0.40

dweight: the rows of a tile are taps, its sum goes over the pixels of a rectangle. A rectangle with few pixels costs as
much as many of them, so weight_gradient.py computes dweight of small images.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import REGISTERS, apart_jit, helper, parallel_jit, prange
from minidl.engine.team import thread_count
from minidl.kernels.matmul.blocks import LINE, aligned
from minidl.kernels.matmul.emitter import Emitter, Sums, Value, instructions
from minidl.kernels.matmul.tile import end_of_layer, lanes, whole_vectors

from .channels import channel_panel, columns_within
from .geometry import Axis, Layer, ceildiv, forward_axis, gradient_axis, layer_of
from .reference import Pair, Shape
from .rows import fill_end
from .sizes import MAX_COPY, NR, SERIAL

HEIGHTS = (8, 6, 4, 2, 1) if REGISTERS == 32 else (4, 2, 1)  # pixels of a tile: two vectors of sums for each
FEWEST = 12  # pixels of a rectangle, on average, for dweight; with fewer, weight_gradient.py is faster


@instructions
def _tile(
    e: Emitter, rows: Value, taps: Value, at: Value, a: Value, a_offsets: Value, a_at: Value, a_row: Value, b: Value,
    b_offsets: Value, b_at: Value, c: Value, c_at: Value, c_row: Value, width: Value, finish: Value, end: Value,
    end_step: Value, shortcut: Value, adds: Value,
) -> None:  # fmt: skip
    """Compute c[c_at + i * c_row + j] for i < rows <= HEIGHTS[0] and j < width, the sum over k < taps of

        a[a_at + i * a_row + a_offsets[at + k] + j] * b[b_at + b_offsets[at + k] + j]

    width: two whole vectors, or at most one vector, of which only `width` numbers are read. taps: at least 1. If
    `finish`, apply the end of the layer (matmul/tile.py) from column b_at on; the shortcut has the layout of c.
    """
    a, b, c, shortcut, end = e.at(a, a_at), e.at(b, b_at), e.at(c, c_at), e.at(shortcut, c_at), e.at(end, b_at)
    a_offsets, b_offsets = e.at(a_offsets, at), e.at(b_offsets, at)

    def tile(vectors: int, height: int) -> None:
        numbers = e.row_numbers(rows, height)
        rows_of_c = [e.at(c, e.times(i, c_row)) for i in numbers]
        rows_of_a = [e.at(a, e.times(i, a_row)) for i in numbers]
        e.prefetch_rows(rows_of_c, vectors)

        def add_products(sums: Sums, k: Value) -> Sums:
            weights, offset = columns_within(e, e.at(b, e.number(b_offsets, k)), vectors, width), e.number(a_offsets, k)
            added = {}
            for i, row in enumerate(rows_of_a):
                for v, column in enumerate(columns_within(e, e.at(row, offset), vectors, width)):
                    added[i, v] = e.multiply_add(column, weights[v], sums[i, v])
            return added

        sums = e.loop(taps, [], e.zeros(height, vectors), add_products)
        others = [e.at(shortcut, e.times(i, c_row)) for i in numbers]
        e.write(end_of_layer(e, sums, width, finish, end, end_step, others, adds), rows_of_c, width)

    e.fewest_vectors(width, 2, lambda vectors: e.lowest(rows, HEIGHTS, lambda height: tile(vectors, height)))


@apart_jit
def _runs(axis: Axis) -> ndarray:
    """Return the runs of an axis, each as (first output, last output + 1, first tap, last tap + 1)."""
    found, count = np.empty((axis.pixels, 4), np.int64), 0
    for i in range(axis.pixels):
        start = axis.offset + i * axis.step  # the place of tap 0
        first = max(0, ceildiv(-start, axis.spacing))
        last = max(first, min(axis.taps, ceildiv(axis.source - start, axis.spacing)))
        if count == 0 or found[count - 1, 2] != first or found[count - 1, 3] != last:
            found[count, 0], found[count, 2], found[count, 3] = i, first, last
            count += 1
        found[count - 1, 1] = i + 1
    return found[:count]


@helper
def _axes(layer: Layer, backward: bool, size: Pair, out: Pair, remainder: int) -> tuple[Axis, Axis]:
    """Return the vertical and the horizontal axis of a pass (direct.py, _cut); size, out: of x and y."""
    if backward:
        return (
            gradient_axis(layer, 0, size[0], out[0], remainder // layer.stride[1]),
            gradient_axis(layer, 1, size[1], out[1], remainder % layer.stride[1]),
        )
    return forward_axis(layer, 0, size[0], out[0], 1), forward_axis(layer, 1, size[1], out[1], 1)


@helper
def _passes(layer: Layer, backward: bool) -> int:
    return layer.stride[0] * layer.stride[1] if backward else 1


@helper
def is_computed(
    w_shape: Shape, backward: bool, size: Pair, out: Pair, groups: int, stride: Pair, padding: Pair, dilation: Pair
) -> bool:
    """Return whether y or, if `backward`, dx is computed here; size, out: (height, width) of x and y."""
    return fits(layer_of(w_shape, backward, groups, stride, padding, dilation), backward, size, out, 1)


@apart_jit
def fits(layer: Layer, backward: bool, size: Pair, out: Pair, fewest: int) -> bool:
    """Return whether the layer is depthwise, each pixel has a tap, and a rectangle at least `fewest` pixels on average.

    A pixel has no tap if its window is outside the image or, for dx, between windows (stride > kernel).
    """
    if layer.groups == 1 or layer.inner * layer.outer > 1:
        return False
    pixels, rectangles = 0, 0
    for remainder in range(_passes(layer, backward)):
        v, h = _axes(layer, backward, size, out, remainder)
        rows, columns = _runs(v), _runs(h)
        for run in rows:
            if run[2] == run[3]:
                return False
        for run in columns:
            if run[2] == run[3]:
                return False
        pixels, rectangles = pixels + v.pixels * h.pixels, rectangles + rows.shape[0] * columns.shape[0]
    return pixels >= fewest * rectangles


@apart_jit
def _offsets(layer: Layer, v: Axis, h: Axis, rows: ndarray, columns: ndarray) -> tuple[ndarray, ndarray]:
    """Return the offsets of the taps in the source, and in the weights: v.taps * h.taps for each rectangle."""
    taps = v.taps * h.taps
    count = rows.shape[0] * columns.shape[0] * taps
    source, weight = np.empty(count, np.int64), np.empty(count, np.int64)
    for r in range(rows.shape[0]):
        for q in range(columns.shape[0]):
            k = (r * columns.shape[0] + q) * taps
            for s in range(rows[r, 2], rows[r, 3]):
                for t in range(columns[q, 2], columns[q, 3]):
                    u, column = v.tap + s * v.tap_step, h.tap + t * h.tap_step
                    source[k] = (s * v.spacing * h.source + t * h.spacing) * layer.groups
                    weight[k] = (u * layer.kernel[1] + column) * layer.groups
                    k += 1
    return source, weight


@helper
def _rows_of_band(layer: Layer, v: Axis, h: Axis, batch: int, tasks: int) -> int:
    """Return how many rows of outputs are computed together: what they read stays in L2, and each task has some."""
    rows = max(1, min(v.pixels, MAX_COPY // (v.step * h.source * layer.groups)))
    while rows > 1 and batch * ceildiv(v.pixels, rows) < 4 * tasks:
        rows = ceildiv(rows, 2)
    return ceildiv(v.pixels, ceildiv(v.pixels, rows))


@apart_jit
def _pass(
    task: int, tasks: int, layer: Layer, v: Axis, h: Axis, batch: int, source: ndarray, weight: ndarray, finish: bool,
    end: ndarray, shortcut: ndarray, out: ndarray,
) -> None:  # fmt: skip
    """Compute this task's bands of a pass. If `finish`, also apply the end of the layer."""
    channels, rows, columns = layer.groups, _runs(v), _runs(h)
    a_offsets, b_offsets = _offsets(layer, v, h, rows, columns)
    line, c_line = h.source * channels, h.out * channels
    each, pair = _rows_of_band(layer, v, h, batch, tasks), 2 * lanes(out)
    end_step, adds = end.size // 4, shortcut.size > 0
    bands = ceildiv(v.pixels, each)
    for number in range(task * batch * bands // tasks, (task + 1) * batch * bands // tasks):
        image, begin = number // bands, number % bands * each
        for r in range(rows.shape[0]):
            top, bottom = max(begin, rows[r, 0]), min(begin + each, rows[r, 1])
            if top >= bottom:
                continue
            for q in range(columns.shape[0]):
                left, right = columns[q, 0], columns[q, 1]
                taps = (rows[r, 3] - rows[r, 2]) * (columns[q, 3] - columns[q, 2])
                table = (r * columns.shape[0] + q) * v.taps * h.taps
                at = (image * v.source + v.offset + top * v.step) * line + (h.offset + left * h.step) * channels
                to = (image * v.out + v.first + top * v.stride) * c_line + (h.first + left * h.stride) * channels
                # The steps from a line of pixels to the next one, and along a line
                lines, a_line, to_line = bottom - top, v.step * line, v.stride * c_line
                pixels, a_row, to_row = right - left, h.step * channels, h.stride * channels
                if lines > pixels:
                    lines, pixels, a_line, a_row, to_line, to_row = pixels, lines, a_row, a_line, to_row, to_line
                for i in range(lines):
                    for first in range(0, pixels, HEIGHTS[0]):
                        some, channel = min(HEIGHTS[0], pixels - first), 0
                        a_at, c_at = at + i * a_line + first * a_row, to + i * to_line + first * to_row
                        while channel < channels:
                            width = pair if channels - channel >= pair else min(channels - channel, lanes(out))
                            _tile(some, taps, table, source, a_offsets, a_at + channel, a_row, weight, b_offsets,
                                  channel, out, c_at + channel, to_row, width, finish, end, end_step, shortcut,
                                  adds)  # fmt: skip
                            channel += width


@apart_jit
def _task(
    task: int, tasks: int, source: ndarray, weight: ndarray, backward: bool, size: Pair, of_y: Pair, groups: int,
    stride: Pair, padding: Pair, dilation: Pair, finish: bool, end: ndarray, shortcut: ndarray, out: ndarray,
) -> None:  # fmt: skip
    """Compute this task's bands of all passes."""
    layer = layer_of(weight.shape, backward, groups, stride, padding, dilation)
    for remainder in range(_passes(layer, backward)):
        v, h = _axes(layer, backward, size, of_y, remainder)
        _pass(task, tasks, layer, v, h, source.shape[0], source.reshape(-1), weight.reshape(-1), finish, end, shortcut,
              out.reshape(-1))  # fmt: skip


def scratch_size(w_shape: Shape) -> int:
    """Return the number of elements of convolve's scratch."""
    return int(4 * (w_shape[3] + NR) + LINE)


@parallel_jit
def _divide(
    tasks: int, source: ndarray, weight: ndarray, backward: bool, size: Pair, of_y: Pair, groups: int, stride: Pair,
    padding: Pair, dilation: Pair, finish: bool, end: ndarray, shortcut: ndarray, out: ndarray,
) -> None:  # fmt: skip
    """Divide the bands among the threads."""
    for task in prange(tasks):  # task is unsigned
        _task(np.int64(task), tasks, source, weight, backward, size, of_y, groups, stride, padding, dilation, finish,
              end, shortcut, out)  # fmt: skip


@helper
def convolve(
    source: ndarray, weight: ndarray, backward: bool, bias: ndarray, scale: ndarray, shift: ndarray,
    shortcut: ndarray, relu: bool, groups: int, stride: Pair, padding: Pair, dilation: Pair, scratch: ndarray,
    out: ndarray,
) -> None:  # fmt: skip
    """Compute out = y from source = x or, if `backward`, out = dx from source = dy, as direct.py does."""
    end = aligned(scratch)[: 4 * whole_vectors(groups, out)]
    fill_end(bias, scale, shift, relu, 1, 1, end)
    finish = relu or bias.size + scale.size + shortcut.size > 0
    size, of_y = (out.shape[1:3], source.shape[1:3]) if backward else (source.shape[1:3], out.shape[1:3])
    if source.shape[0] * size[0] * size[1] * weight.size <= SERIAL * stride[0] * stride[1]:
        # Without a parallel loop, no other thread has to wake up.
        _task(0, 1, source, weight, backward, size, of_y, groups, stride, padding, dilation, finish, end, shortcut, out)
    else:
        _divide(thread_count(), source, weight, backward, size, of_y, groups, stride, padding, dilation, finish, end,
                shortcut, out)  # fmt: skip


@apart_jit
def _pixels(
    images: int, each: int, v: Axis, h: Axis, rows: ndarray, columns: ndarray, channels: int
) -> tuple[ndarray, ndarray, ndarray]:
    """Return the offsets of the pixels of each rectangle in x and in dy, and where those of a rectangle begin.

    A rectangle has up to `each` rows here, of each of the images.
    """
    starts, count = np.empty(rows.shape[0] * columns.shape[0], np.int64), 0
    size = images * v.pixels * h.pixels
    of_x, of_dy = np.empty(size, np.int64), np.empty(size, np.int64)
    for r in range(rows.shape[0]):
        for q in range(columns.shape[0]):
            starts[r * columns.shape[0] + q] = count
            for image in range(images):
                for i in range(min(each, rows[r, 1] - rows[r, 0])):
                    line, of_y = image * v.source + i * v.step, image * v.out + i
                    for j in range(columns[q, 1] - columns[q, 0]):
                        of_x[count] = (line * h.source + j * h.step) * channels
                        of_dy[count] = (of_y * h.out + j) * channels
                        count += 1
    return of_x, of_dy, starts


@apart_jit
def gradient_part(split: int, splits: int, layer: Layer, x: ndarray, dy: ndarray, total: ndarray) -> None:
    """Sum dweight (kh * kw * C,) over part `split` of the pixels.

    The rows of a tile (channels.py) are taps, and k is a pixel: of a band of a rectangle, or of a rectangle of several
    small images. They depend on the sizes alone, and so do the bits.
    """
    batch, channels = x.shape[0], layer.groups
    v, h = _axes(layer, False, x.shape[1:3], dy.shape[1:3], 0)
    rows, columns = _runs(v), _runs(h)
    taps_of_x, taps_of_weight = _offsets(layer, v, h, rows, columns)
    each, images = _rows_of_band(layer, v, h, 1, 0), 1
    if each == v.pixels:
        images = max(1, min(batch // splits, MAX_COPY // (v.source * h.source * channels)))
    of_x, of_dy, starts = _pixels(images, each, v, h, rows, columns, channels)
    bands, pair, nothing = ceildiv(v.pixels, each), 2 * lanes(x), total[:0]
    source, gradient = x.reshape(-1), dy.reshape(-1)
    for i in range(total.size):
        total[i] = 0
    blocks = ceildiv(batch, images) * bands
    for number in range(split * blocks // splits, (split + 1) * blocks // splits):
        image, begin = number // bands * images, number % bands * each
        some = min(images, batch - image)
        for r in range(rows.shape[0]):
            top, bottom = max(begin, rows[r, 0]), min(begin + each, rows[r, 1])
            if top >= bottom:
                continue
            for q in range(columns.shape[0]):
                left, wide = columns[q, 0], columns[q, 1] - columns[q, 0]
                taps = (rows[r, 3] - rows[r, 2]) * (columns[q, 3] - columns[q, 2])
                rectangle, channel = r * columns.shape[0] + q, 0
                table, k = rectangle * v.taps * h.taps, starts[rectangle]
                line = image * v.source + v.offset + top * v.step
                at = (line * h.source + h.offset + left * h.step) * channels
                b_at = ((image * v.out + top) * h.out + left) * channels
                while channel < channels:
                    width = pair if channels - channel >= pair else min(channels - channel, lanes(x))
                    channel_panel(taps, some * (bottom - top) * wide, True, source, of_x[k:], taps_of_x[table:],
                                  at + channel, gradient, of_dy[k:], b_at + channel, total, taps_of_weight[table:],
                                  channel, width, False, nothing, 0, nothing)  # fmt: skip
                    channel += width
