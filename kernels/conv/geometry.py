"""Which pixel reads which: the geometry of a convolution, one axis at a time.

A convolution and its gradient with respect to the images consist of passes. A pass computes a sum of the following
form, in which a tap t is one position in the window that an output reads. Along one axis, for i < pixels,

    out[first + i * stride] = sum over t < taps of
                              source[offset + i * step + t * spacing] * weight[tap + t * tap_step]

where the source is 0 beyond its ends. For a layer of stride s and dilation d:
    forward:   i goes through all output pixels (first = 0, stride = 1). The window moves by s pixels (step = s).
    gradient:  pixel p of dx is the sum of dy[i] * weight[u] over all i and u with
               p = i * s + u * d - padding. Pixels with the same remainder modulo s use the same u. So for each
               remainder there is one pass, a convolution with a step of 1 and some of the taps.

If there are few output channels, a bundle of P neighbouring pixels is computed as one pixel with P times as many
channels (P is `bundle` in the code). These channels are contiguous in memory and fill a vector. The window of a bundle
contains all that its pixels read. The weight of pixel p of the bundle at tap t of this window is
weight[tap + t * tap_step + p * tap_pixel], or 0 if there is no such weight. NaN times 0 is NaN, so one NaN in the
source spoils every bundle whose window contains it.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from numpy import ndarray

from minidl.engine.jit import apart_jit, helper
from minidl.kernels.matmul.tile import lanes, panel_width, widest_panel

from .line import pixels_in_tiles
from .reference import Pair, Shape
from .sizes import MAX_BUNDLE, NR


class Layer(NamedTuple):
    """The channels and the options of a convolution. Each group computes `outer` channels from `inner` channels.

    In the forward pass and in the weight gradient, inner = C / groups and outer = O / groups. In the data gradient,
    inner = O / groups and outer = C / groups.
    """

    kernel: Pair
    inner: int
    outer: int
    groups: int
    stride: Pair
    padding: Pair
    dilation: Pair


class Axis(NamedTuple):
    """One axis of a pass; the module's docstring explains the names."""

    source: int  # pixels of the source
    out: int  # pixels of the output
    pixels: int  # outputs of this pass, or bundles of them
    first: int
    stride: int
    step: int
    offset: int
    spacing: int
    taps: int
    tap: int
    tap_step: int
    bundle: int
    rest: int  # pixels of the last bundle
    tap_pixel: int


@helper
def ceildiv(number: int, divisor: int) -> int:
    """Return number / divisor, rounded up."""
    return (number + divisor - 1) // divisor


@helper
def layer_of(w_shape: Shape, backward: bool, groups: int, stride: Pair, padding: Pair, dilation: Pair) -> Layer:
    """Return the layer with weights of w_shape (kh, kw, C/groups, O), for its data gradient if `backward`."""
    inner, outer = (w_shape[3] // groups, w_shape[2]) if backward else (w_shape[2], w_shape[3] // groups)
    return Layer((w_shape[0], w_shape[1]), inner, outer, groups, stride, padding, dilation)


@helper
def by_channels(layer: Layer) -> bool:
    """Return whether each group has so few outputs that vectors should extend across groups.

    A single group fills only outer / 16 of a vector. Vectors across groups are full, but their tile is half as fast,
    and each number of x is copied to the lane of every output of its group. Measured (float32, 32 channels): with 2
    outputs in a group, vectors across groups are 3 to 4 times as fast as separate groups; with 4 outputs, equally fast;
    with 8, a third as fast.
    """
    return layer.groups > 1 and 8 * layer.outer <= NR  # NR also for float64: scratch_size does not know the type


@helper
def forward_axis(layer: Layer, axis: int, size: int, out: int, bundle: int) -> Axis:
    """Return the axis of a pass from x (size,) to y (out,). With dilation, `bundle` must be 1."""
    kernel, stride = layer.kernel[axis], layer.stride[axis]
    padding, dilation = layer.padding[axis], layer.dilation[axis]
    bundles, taps = ceildiv(out, bundle), kernel + (bundle - 1) * stride
    rest, step = out - (bundles - 1) * bundle, bundle * stride
    return Axis(size, out, bundles, 0, bundle, step, -padding, dilation, taps, 0, 1, bundle, rest, -stride)


@helper
def gradient_axis(layer: Layer, axis: int, size: int, out: int, remainder: int) -> Axis:
    """Return the axis of a pass from dy (out,) to the pixels `remainder`, `remainder` + stride, ... of dx (size,)."""
    kernel, stride = layer.kernel[axis], layer.stride[axis]
    padding, dilation = layer.padding[axis], layer.dilation[axis]
    divisor = gcd(stride, dilation)
    tap_step = stride // divisor
    tap = 0  # the first tap that reaches these pixels; every tap_step-th tap after it reaches them, too
    while tap < tap_step and (remainder + padding - tap * dilation) % stride:
        tap += 1
    taps = ceildiv(kernel - tap, tap_step) if tap < min(kernel, tap_step) else 0
    last = tap + (taps - 1) * tap_step
    offset = (remainder + padding - last * dilation) // stride
    count = max(0, ceildiv(size - remainder, stride))
    return Axis(out, size, count, remainder, stride, 1, offset, dilation // divisor, taps, last, -tap_step, 1, 1, 0)


@helper
def gradient_bundles(layer: Layer, axis: int, size: int, out: int, bundle: int) -> Axis:
    """Return the axis of a pass from dy (out,) to all pixels of dx (size,).

    The dilation must be 1, and `bundle` a multiple of the stride. Pixel p reads those dy[i] for which
    p + padding - kernel < i * stride <= p + padding.
    """
    kernel, stride, padding = layer.kernel[axis], layer.stride[axis], layer.padding[axis]
    offset = -((kernel - 1 - padding) // stride)
    taps = (bundle - 1 + padding) // stride - offset + 1
    bundles = ceildiv(size, bundle)
    rest, tap = size - (bundles - 1) * bundle, padding - offset * stride
    return Axis(out, size, bundles, 0, bundle, bundle // stride, offset, 1, taps, tap, -stride, bundle, rest, 1)


@helper
def passes_of(layer: Layer, backward: bool) -> int:
    """Return the number of passes: one forward, and for dx one for each pair of remainders modulo the strides."""
    return layer.stride[0] * layer.stride[1] if backward else 1


@helper
def axes_of(layer: Layer, backward: bool, size: Pair, out: Pair, remainder: int, bundle: int) -> tuple[Axis, Axis]:
    """Return the vertical and the horizontal axis of pass number `remainder`; size, out: (height, width) of x and y.

    For dx with bundles, the passes for horizontal remainder 0 compute all pixels of their rows, and no others are
    needed.
    """
    if backward:
        v = gradient_axis(layer, 0, size[0], out[0], remainder // layer.stride[1])
        if bundle > 1:
            return v, gradient_bundles(layer, 1, size[1], out[1], bundle)
        return v, gradient_axis(layer, 1, size[1], out[1], remainder % layer.stride[1])
    return forward_axis(layer, 0, size[0], out[0], 1), forward_axis(layer, 1, size[1], out[1], bundle)


@helper
def shares(axis: Axis) -> bool:
    """Return whether neighbouring outputs read so many of the same pixels that line.py computes them faster."""
    return axis.spacing == 1 and ((axis.step == 1 and axis.taps > 1) or (axis.step == 2 and axis.taps == 3))


@helper
def whole_bundles(axis: Axis) -> int:
    """Return the number of complete bundles in a row of outputs."""
    return axis.pixels - 1 if axis.rest < axis.bundle else axis.pixels


@helper
def bundles_in_tiles(layer: Layer, axis: Axis, array: ndarray) -> int:
    """Return how many pixels (or bundles) of each row of outputs line.py computes; axis: the horizontal one."""
    columns = axis.bundle * layer.outer
    if by_channels(layer) or not shares(axis) or (layer.groups > 1 and axis.bundle > 1):
        return 0
    return pixels_in_tiles(whole_bundles(axis), widest_panel(columns, array), array)


@helper
def _cost(layer: Layer, axis: Axis, array: ndarray) -> int:
    """Estimate the time of a pass with this horizontal axis. A row of a tile takes 30 units, plus 4 units for each
    number of the source that the row multiplies (3 units if the row is a single vector; one less in line.py). With
    several groups, the pixels of a bundle are stored one by one, in 60 units each."""
    numbers = axis.taps * layer.kernel[0] * layer.inner  # of the source, for each row
    row = 30 + (60 * axis.bundle if layer.groups > 1 and axis.bundle > 1 else 0)
    each = 3 if axis.bundle * layer.outer <= lanes(array) else 4
    return (each * numbers + row) * axis.pixels - numbers * bundles_in_tiles(layer, axis, array)


@apart_jit
def bundle_of(layer: Layer, backward: bool, size: int, out: int, array: ndarray) -> int:
    """Return how many pixels to compute as one, for lines of `size` pixels in x and of `out` pixels in y."""
    stride, best, least = layer.stride[1], 1, 0
    if by_channels(layer) or layer.dilation[1] > 1:
        return best
    for remainder in range(stride if backward else 1):
        axis = gradient_axis(layer, 1, size, out, remainder) if backward else forward_axis(layer, 1, size, out, 1)
        least += _cost(layer, axis, array)
    for bundle in range(2, min(MAX_BUNDLE, panel_width(array) // layer.outer) + 1):
        if backward and bundle % stride:
            continue
        axis = forward_axis(layer, 1, size, out, bundle)
        if backward:
            axis = gradient_bundles(layer, 1, size, out, bundle)
        cost = _cost(layer, axis, array)
        if cost < least:
            best, least = bundle, cost
    return best


@helper
def trimmed(axis: Axis) -> Axis:
    """Return the axis without the taps at its ends that read only beyond the ends of the source, but with one tap if
    it had any.

    With 3 taps and padding, for example, only one of them reads an image of one pixel. `bundle` must be 1.
    """
    first, last, offset = 0, axis.taps, axis.offset
    while last - first > 1 and offset + first * axis.spacing + (axis.pixels - 1) * axis.step < 0:
        first += 1
    while last - first > 1 and offset + (last - 1) * axis.spacing >= axis.source:
        last -= 1
    offset, tap = offset + first * axis.spacing, axis.tap + first * axis.tap_step
    return Axis(axis.source, axis.out, axis.pixels, axis.first, axis.stride, axis.step, offset, axis.spacing,
                last - first, tap, axis.tap_step, 1, axis.rest, axis.tap_pixel)  # fmt: skip


@helper
def span(axis: Axis, outputs: int) -> int:
    """Return the length, in pixels, of the range of the source that this many neighbouring outputs read."""
    return (outputs - 1) * axis.step + (axis.taps - 1) * axis.spacing + 1


@helper
def inside(axis: Axis) -> bool:
    """Return whether no output reads beyond the ends of the source."""
    return axis.offset >= 0 and axis.offset + span(axis, axis.pixels) <= axis.source
