"""Which pixel reads which, for CUDA kernels: the passes of a convolution or of its gradient with respect to the images.

A pass computes a part of `out` from `source`. Forward is one pass: out = y, source = x. The gradient has a pass for
each pair of remainders of pixels modulo the strides: out = dx, source = dy. geometry.py explains this, and the formula

    out[first + i * stride] = sum over t < taps of
                              source[offset + i * step + t * spacing] * weight[tap + t * tap_step]

along each axis. In the names below, _h is the vertical axis and _w the horizontal one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import int32, uint32

from minidl.engine.cuda import device

from .geometry import Axis, Layer, forward_axis, gradient_axis, layer_of
from .reference import Pair, Shape


class Pass(NamedTuple):
    """A pass over all images. A group computes `outer` channels of out from `inner` channels of source."""

    images: int
    groups: int
    inner: int
    outer: int
    source_h: int  # pixels
    source_w: int
    out_h: int
    out_w: int
    pixels_h: int  # that this pass computes
    pixels_w: int
    first_h: int
    first_w: int
    stride_h: int
    stride_w: int
    step_h: int
    step_w: int
    offset_h: int
    offset_w: int
    spacing_h: int
    spacing_w: int
    taps_h: int
    taps_w: int
    weight: int  # the weights of the first tap
    weight_channel: int  # from the weights of a channel of source to those of the next channel, in elements
    weight_right: int  # from those of a tap to those of the next one in its line
    weight_down: int  # from line to line

    @property
    def rows(self) -> int:
        """The number of pixels of out that this pass computes."""
        return self.images * self.pixels_h * self.pixels_w


def passes(
    x_shape: Shape, w_shape: Shape, out: Pair, backward: bool, groups: int, stride: Pair, padding: Pair, dilation: Pair
) -> list[Pass]:
    """Return the passes of forward or of backward_input. out: (Ho, Wo), the pixels of y."""
    layer = layer_of(w_shape, backward, groups, stride, padding, dilation)

    def along(axis: int) -> list[Axis]:
        size = x_shape[1 + axis]
        if backward:
            return [gradient_axis(layer, axis, size, out[axis], remainder) for remainder in range(stride[axis])]
        return [forward_axis(layer, axis, size, out[axis], 1)]

    return [_pass(x_shape[0], layer, backward, w_shape[1], h, w) for h in along(0) for w in along(1)]


def _pass(images: int, layer: Layer, backward: bool, kernel_w: int, h: Axis, w: Axis) -> Pass:
    fields = "source", "out", "pixels", "first", "stride", "step", "offset", "spacing", "taps"
    numbers = [images, layer.groups, layer.inner, layer.outer]
    numbers += (int(getattr(axis, field)) for field in fields for axis in (h, w))
    channels = layer.groups * layer.inner  # of source
    tap = layer.outer * channels  # elements of the weights
    numbers += (
        (h.tap * kernel_w + w.tap) * tap,  # weight
        1 if backward else layer.groups * layer.outer,  # weight_channel
        w.tap_step * tap,  # weight_right
        h.tap_step * kernel_w * tap,  # weight_down
    )
    return Pass(*numbers)


@device
def quotient(number: int, divisor: int) -> int:
    """Return number // divisor; both are positive. (Numba would divide 64-bit integers, with Python's signs.)"""
    return int32(uint32(number) // uint32(divisor))


@device
def split(pixel: int, height: int, width: int) -> tuple[int, int, int]:
    """Return (image, line, column) of a pixel; an image has height x width pixels."""
    line = quotient(pixel, width)
    image = quotient(line, height)
    return image, int32(line - image * height), int32(pixel - line * width)


@device
def inside(h: int, w: int, height: int, width: int) -> Any:
    """Return whether a pixel lies in the image. As an unsigned number, a negative one is larger than any size."""
    return uint32(h) < uint32(height) and uint32(w) < uint32(width)


@device
def place(g: Pass, row: int) -> int:
    """Return the pixel of out, counted over all images, that is number `row` of this pass."""
    if g.stride_h == 1 and g.stride_w == 1:
        return row
    image, i, j = split(row, g.pixels_h, g.pixels_w)
    return int32((image * g.out_h + g.first_h + i * g.stride_h) * g.out_w + g.first_w + j * g.stride_w)
