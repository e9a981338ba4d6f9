"""The weight gradient of depthwise convolutions, and of groups of 2, 4 or 8 channels.

    dweight[tap, m, c] = sum over pixels of  x[pixel + tap, first(c) + m] * dy[pixel, c]          (names: depthwise.py)

The rows of a tile are the channels m of some taps, its columns are two vectors of channels c. Its sum goes over the
pixels of a rectangle (rectangles.py), or of a rectangle in each of several small images. A rectangle with few pixels
costs as much as one with many, so weight_gradient.py computes a depthwise dweight of small images.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy import ndarray

from minidl.engine.jit import REGISTERS, apart_jit, helper, parallel_jit, prange
from minidl.engine.team import thread_count
from minidl.kernels.matmul.blocks import LINE, aligned
from minidl.kernels.matmul.emitter import Emitter, Sums, Value, instructions
from minidl.kernels.matmul.tile import lanes

from .channels import channel_of_group, channel_width, columns_within
from .geometry import Axis, Layer, axes_of, ceildiv, layer_of
from .norms import normalize
from .rectangles import lines_of_band, memory_of_band, rows_of_band, runs_of, tap_offsets
from .reference import Pair, Shape
from .sizes import MAX_COPY, NARROW, SERIAL
from .weight_gradient import add_parts, splits_of


@helper
def _taps_of_tile(size: int) -> int:
    """Return how many taps a tile has, for groups of `size` channels: together up to 24 vectors of sums."""
    return 9 if size == 1 else 6 if size == 2 else 3 if size == 4 else 1


@instructions
def _tile(
    e: Emitter, size: Value, taps: Value, pixels: Value, a: Value, a_offsets: Value, a_taps: Value, a_at: Value,
    b: Value, b_offsets: Value, b_at: Value, c: Value, c_taps: Value, c_at: Value, c_step: Value, width: Value,
) -> None:  # fmt: skip
    """Add to c[c_at + c_taps[i] + m * c_step + j], for some taps i and m < size, the sum over k < pixels of

        a[a_at + a_offsets[k] + a_taps[i] + first(j) + m] * b[b_at + b_offsets[k] + j]

    taps: how many, up to _taps_of_tile(size); width: of the columns j, as in depthwise.py
    """
    a, b, c = e.at(a, a_at), e.at(b, b_at), e.at(c, c_at)

    def tile(channels: int, vectors: int) -> None:
        numbers = e.row_numbers(taps, _taps_of_tile.py_func(channels))
        rows_of_a = [e.at(a, e.number(a_taps, i)) for i in numbers]
        rows_of_c = [e.at(e.at(c, e.number(c_taps, i)), e.times(c_step, m)) for i in numbers for m in range(channels)]

        def add_pixel(sums: Sums, k: Value) -> Sums:
            gradients, at = columns_within(e, e.at(b, e.number(b_offsets, k)), vectors, width), e.number(a_offsets, k)
            added = {}
            for i, row in enumerate(rows_of_a):
                for v, column in enumerate(columns_within(e, e.at(row, at), vectors, width)):
                    for m in range(channels):
                        here = i * channels + m, v
                        number = channel_of_group(e, column, m, channels)
                        added[here] = e.multiply_add(number, gradients[v], sums[here])
            return added

        sums = e.loop(pixels, [], e.zeros(len(rows_of_c), vectors), add_pixel)
        e.write(e.plus_rows(sums, rows_of_c, width), rows_of_c, width)

    most = 2 if REGISTERS == 32 else 1
    e.lowest(size, NARROW[::-1], lambda channels: e.fewest_vectors(width, most, partial(tile, channels)))


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
def _part(
    split: int, splits: int, layer: Layer, x: ndarray, dy: ndarray, before: ndarray, band: ndarray, total: ndarray
) -> None:
    """Sum dweight (kh * kw * size * C,) over part `split` of the pixels.

    A sum goes over the pixels of a band of a rectangle, or of a rectangle of several small images. Bands and blocks of
    images depend on the sizes alone, and so do the bits. before: see Norms (norms.py); band: memory for it
    """
    batch, size, channels = x.shape[0], layer.inner, layer.groups * layer.inner
    most = _taps_of_tile(size)
    v, h = axes_of(layer, False, x.shape[1:3], dy.shape[1:3], 0, 1)
    rows, columns = runs_of(v), runs_of(h)
    taps_of_x, taps_of_weight = tap_offsets(layer, v, h, rows, columns)
    each, images = rows_of_band(layer, v, h, 1, 0), 1
    if each == v.pixels:
        images = max(1, min(batch // splits, MAX_COPY // (v.source * h.source * channels)))
    of_x, of_dy, starts = _pixels(images, each, v, h, rows, columns, channels)
    bands, pair = ceildiv(v.pixels, each), channel_width(x)
    source, gradient = x.reshape(-1), dy.reshape(-1)
    for i in range(total.size):
        total[i] = 0
    blocks = ceildiv(batch, images) * bands
    for number in range(split * blocks // splits, (split + 1) * blocks // splits):
        image, begin = number // bands * images, number % bands * each
        some = min(images, batch - image)
        pixels_of_x, above = source, image * v.source  # above: lines of pixels before the image
        if before.size:
            low, high = lines_of_band(v, begin, min(v.pixels, begin + each)) if some == 1 else (0, some * v.source)
            normalize(source, (above + low) * h.source, (above + high) * h.source, before, band)
            pixels_of_x, above = band, -low
        for r in range(rows.shape[0]):
            top, bottom = max(begin, rows[r, 0]), min(begin + each, rows[r, 1])
            if top >= bottom:
                continue
            for q in range(columns.shape[0]):
                left, wide = columns[q, 0], columns[q, 1] - columns[q, 0]
                taps = (rows[r, 3] - rows[r, 2]) * (columns[q, 3] - columns[q, 2])
                rectangle, channel = r * columns.shape[0] + q, 0
                table, k = rectangle * v.taps * h.taps, starts[rectangle]
                line = above + v.offset + top * v.step
                at = (line * h.source + h.offset + left * h.step) * channels
                b_at = ((image * v.out + top) * h.out + left) * channels
                while channel < channels:
                    width = pair if channels - channel >= pair else min(channels - channel, lanes(x))
                    for tap in range(0, taps, most):
                        _tile(size, min(most, taps - tap), some * (bottom - top) * wide, pixels_of_x, of_x[k:],
                              taps_of_x[table + tap :], at + channel, gradient, of_dy[k:], b_at + channel, total,
                              taps_of_weight[table + tap :], channel, channels, width)  # fmt: skip
                    channel += width


@apart_jit
def _task(
    phase: int, task: int, tasks: int, splits: int, layer: Layer, x: ndarray, dy: ndarray, before: ndarray,
    band: ndarray, parts: ndarray, dweight: ndarray,
) -> None:  # fmt: skip
    """In phase 0, sum parts of the pixels. In phase 1, add up the parts for this task's section of dweight."""
    total = dweight.reshape(-1)
    if phase == 1:
        add_parts(task, tasks, parts, splits, total)
        return
    for split in range(task * splits // tasks, (task + 1) * splits // tasks):
        part = parts[split * total.size : (split + 1) * total.size] if splits > 1 else total
        _part(split, splits, layer, x, dy, before, band, part)


@helper
def _size_of_parts(pixels: int, w_shape: Shape) -> int:
    """Return the number of elements of all parts; pixels: of dy."""
    splits = splits_of(pixels, 1)
    return splits * w_shape[0] * w_shape[1] * w_shape[2] * w_shape[3] if splits > 1 else 0


def scratch_size(x_shape: Shape, out: Pair, w_shape: Shape) -> int:
    """Return the number of elements of backward_weight's scratch, without bands; out: (height, width) of y."""
    return int(LINE + _size_of_parts(x_shape[0] * out[0] * out[1], w_shape))


@parallel_jit
def _divide(
    tasks: int, splits: int, x: ndarray, dy: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    before: ndarray, bands: ndarray, each: int, parts: ndarray, dweight: ndarray,
) -> None:  # fmt: skip
    """Divide the parts, and then the sections of dweight, among the threads."""
    for phase in range(2 if splits > 1 else 1):
        for task in prange(tasks):  # task is unsigned; a tuple of tuples (a Layer) cannot be passed into the loop
            layer = layer_of(dweight.shape, False, groups, stride, padding, dilation)
            own = np.int64(task) * each
            _task(phase, np.int64(task), tasks, splits, layer, x, dy, before, bands[own : own + each], parts, dweight)


@helper
def backward_weight(
    x: ndarray, dy: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair, before: ndarray,
    scratch: ndarray, dweight: ndarray,
) -> None:  # fmt: skip
    """Compute dweight = dL/dweight as weight_gradient.py does.

    before: see Norms (norms.py); it may be used if `normalizes` (rectangles.py) says so, with scratch for bands
    (`memory_of_bands`).
    """
    pixels = dy.shape[0] * dy.shape[1] * dy.shape[2]
    tasks, each, memory = thread_count() if pixels * dweight.size > SERIAL else 1, 0, aligned(scratch)
    bands = aligned(memory[_size_of_parts(pixels, dweight.shape) :])
    if before.size:
        each = memory_of_band(x.shape[1:3], dy.shape[1:3], dweight.shape, groups, stride, padding, dilation)
        tasks = min(tasks, bands.size // each)
    # np.int64: another type of integer would compile _task once more
    _divide(np.int64(tasks), splits_of(pixels, 1), x, dy, groups, stride, padding, dilation, before, bands, each,
            memory, dweight)  # fmt: skip
