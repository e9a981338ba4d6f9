"""Rectangles: outputs of a pass that read the same taps, and all of them within the image.

An axis is divided into runs of such outputs (geometry.py explains passes and axes). With 3 taps and padding 1, it has
three runs:

    row 0           taps 1, 2
    rows 1 ... -2   taps 0, 1, 2       on both axes: nine rectangles of pixels, each with one list of taps
    last row        taps 0, 1

So images need no zeros around them: they are read where they are. depthwise.py and depthwise_gradient.py do so, for
groups of NARROW channels.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import apart_jit, helper, threads
from minidl.kernels.matmul.blocks import LINE

from .geometry import Axis, Layer, axes_of, ceildiv, layer_of
from .reference import Pair, Shape
from .sizes import MAX_COPY, NARROW

FEWEST = 12  # pixels of a rectangle, on average, for a depthwise dweight; with fewer, weight_gradient.py is faster


@apart_jit
def runs_of(axis: Axis) -> ndarray:
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
def is_narrow(w_shape: Shape, groups: int) -> bool:
    """Return whether a layer with weights (kh, kw, C / groups, O) has groups of few channels, as many in y as in x."""
    return groups > 1 and w_shape[2] * groups == w_shape[3] and w_shape[2] in NARROW


def computes_gradient(
    size: Pair, out: Pair, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair
) -> bool:
    """Return whether depthwise_gradient.py computes dweight; size, out: (height, width) of x and y."""
    if not is_narrow(w_shape, groups):
        return False
    if w_shape[2] > 1:
        return True
    v, h = axes_of(layer_of(w_shape, False, groups, stride, padding, dilation), False, size, out, 0, 1)
    rectangles = runs_of(v).shape[0] * runs_of(h).shape[0]
    return v.pixels * h.pixels >= FEWEST * rectangles


@apart_jit
def tap_offsets(layer: Layer, v: Axis, h: Axis, rows: ndarray, columns: ndarray) -> tuple[ndarray, ndarray]:
    """Return the offsets of the taps in the source, and in the weights: v.taps * h.taps for each rectangle, and a 0."""
    taps, channels = v.taps * h.taps, layer.groups * layer.inner
    count = rows.shape[0] * columns.shape[0] * taps + 1
    source, weight = np.empty(count, np.int64), np.empty(count, np.int64)
    source[count - 1] = weight[count - 1] = 0
    for r in range(rows.shape[0]):
        for q in range(columns.shape[0]):
            k = (r * columns.shape[0] + q) * taps
            for s in range(rows[r, 2], rows[r, 3]):
                for t in range(columns[q, 2], columns[q, 3]):
                    u, column = v.tap + s * v.tap_step, h.tap + t * h.tap_step
                    source[k] = (s * v.spacing * h.source + t * h.spacing) * channels
                    weight[k] = (u * layer.kernel[1] + column) * layer.inner * channels
                    k += 1
    return source, weight


@helper
def _most_rows(layer: Layer, v: Axis, h: Axis) -> int:
    """Return how many rows of outputs a band has at most: what they read stays in L2."""
    return max(1, min(v.pixels, MAX_COPY // max(1, v.step * h.source * layer.groups * layer.inner)))


@helper
def rows_of_band(layer: Layer, v: Axis, h: Axis, batch: int, tasks: int) -> int:
    """Return how many rows of outputs are computed together: at most _most_rows, and each task has some."""
    rows = _most_rows(layer, v, h)
    while rows > 1 and batch * ceildiv(v.pixels, rows) < 4 * tasks:
        rows = ceildiv(rows, 2)
    return ceildiv(v.pixels, ceildiv(v.pixels, rows))


# -- bands of a normalised x (norms.py) -------------------------------------------------------------------------------


@helper
def lines_of_band(v: Axis, begin: int, end: int) -> Pair:
    """Return which lines of an image the rows of outputs [begin, end) read: the first one, and the last one + 1."""
    first = v.offset + begin * v.step
    last = v.offset + (end - 1) * v.step + (v.taps - 1) * v.spacing + 1
    return min(v.source, max(0, first)), max(0, min(v.source, last))


@helper
def memory_of_band(
    size: Pair, out: Pair, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair
) -> int:
    """Return how many numbers of x a band reads at most; size, out: (height, width) of x and y."""
    layer = layer_of(w_shape, False, groups, stride, padding, dilation)
    v, h = axes_of(layer, False, size, out, 0, 1)
    lines = (_most_rows(layer, v, h) - 1) * v.step + (v.taps - 1) * v.spacing + 1
    return max(MAX_COPY, min(v.source, lines) * h.source * layer.groups * layer.inner)


def memory_of_bands(
    size: Pair, out: Pair, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair
) -> int:
    """Return how many numbers more of scratch the normalised bands of all threads need."""
    return LINE + threads() * memory_of_band(size, out, w_shape, groups, stride, padding, dilation)


def normalizes(
    size: Pair, out: Pair, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair
) -> bool:
    """Return whether y and dweight can be computed from bands of x that are normalised one by one.

    Neighbouring bands share lines, which are normalised twice: a third of all lines or fewer. (In y, a batch of few
    images is cut into smaller bands, so that each thread has some.)
    """
    if not computes_gradient(size, out, w_shape, groups, stride, padding, dilation):
        return False
    layer = layer_of(w_shape, False, groups, stride, padding, dilation)
    v, h = axes_of(layer, False, size, out, 0, 1)
    rows = _most_rows(layer, v, h)
    return rows == v.pixels or rows * v.step >= 3 * ((v.taps - 1) * v.spacing + 1 - v.step)
