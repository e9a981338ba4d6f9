"""Which pixel meets which: one axis of a convolution at a time, and the copy that puts zeros around an image.

A convolution and its gradient with respect to the images are the same sum. Along one axis, output number i of `pixels`

    stands at pixel  first + i stride  of the output, and sums, for t < taps,
    source pixel     offset + i step + t spacing   times   weight   tap + t tap_step

    forward:   every output pixel stands for itself (first 0, stride 1) and its window moves by `stride` source pixels.
    gradient:  pixel p of dx gets dy[i] weight[u] wherever p = i stride + u dilation - padding. The u for which that has
               a solution are the same for all p with the same remainder modulo the stride: each remainder is a
               convolution of its own, with steps of 1 and some of the taps. With stride 1 there is one.

Where there are few outputs, `block` neighbouring pixels are computed as if they were one pixel with block times as many
outputs: they lie beside each other in memory, and fill a vector. The window is then wide enough for all of them, and
pixel p of the block finds at place t the weight  tap + t tap_step + p tap_pixel, or 0 if there is no such weight.
The price: NaN times 0 is NaN, so that one in x reaches the whole block.
"""

from __future__ import annotations

from typing import NamedTuple

from numpy import ndarray

from minidl.engine.jit import apart_jit, jit
from minidl.kernels.matmul.tile import lanes, panel_width

from .reference import Pair

LINE = 16  # numbers of a cache line (of float32), which `aligned` may leave out
MOST = 8  # pixels of a block, at most: the window of a block has many zeros if it is wide


class Axis(NamedTuple):
    """One axis of a pass, as above."""

    source: int  # pixels of the source
    out: int  # pixels of the output
    pixels: int  # outputs of this pass, or blocks of them
    first: int
    stride: int
    step: int
    offset: int
    spacing: int
    taps: int
    tap: int
    tap_step: int
    block: int
    rest: int  # pixels of the last block
    tap_pixel: int


@jit
def forward_axis(size: int, out: int, kernel: int, stride: int, padding: int, dilation: int) -> Axis:
    return Axis(size, out, out, 0, 1, stride, -padding, dilation, kernel, 0, 1, 1, 1, 0)


@jit
def forward_blocks(size: int, out: int, kernel: int, stride: int, padding: int, block: int) -> Axis:
    """forward_axis without dilation, `block` pixels at a time."""
    blocks = (out + block - 1) // block
    taps = kernel + (block - 1) * stride
    rest = out - (blocks - 1) * block
    return Axis(size, out, blocks, 0, block, block * stride, -padding, 1, taps, 0, 1, block, rest, -stride)


@jit
def gradient_blocks(size: int, out: int, kernel: int, stride: int, padding: int, block: int) -> Axis:
    """For all pixels of dx (size), from dy (out), without dilation; block is a multiple of the stride.

    Pixel p looks at dy[i] for  p + padding - kernel < i stride <= p + padding.
    """
    offset = -((kernel - 1 - padding) // stride)
    taps = (block - 1 + padding) // stride - offset + 1
    blocks = (size + block - 1) // block
    rest, tap = size - (blocks - 1) * block, padding - offset * stride
    return Axis(out, size, blocks, 0, block, block // stride, offset, 1, taps, tap, -stride, block, rest, 1)


@jit
def gradient_axis(
    size: int, out: int, kernel: int, stride: int, padding: int, dilation: int, remainder: int
) -> Axis:
    """For the pixels `remainder`, `remainder` + stride, ... of dx (size), from dy (out)."""
    divisor, rest = stride, dilation
    while rest:
        divisor, rest = rest, divisor % rest
    tap_step = stride // divisor
    tap = 0  # the first tap that reaches these pixels; every tap_step-th after it does, too
    while tap < tap_step and (remainder + padding - tap * dilation) % stride:
        tap += 1
    taps = (kernel - tap + tap_step - 1) // tap_step if tap < min(kernel, tap_step) else 0
    last = tap + (taps - 1) * tap_step
    offset = (remainder + padding - last * dilation) // stride
    count = max(0, (size - remainder + stride - 1) // stride)
    return Axis(out, size, count, remainder, stride, 1, offset, dilation // divisor, taps, last, -tap_step, 1, 1, 0)


@jit
def _cost(axis: Axis, products: int, outer: int, array: ndarray) -> int:
    """About how long it takes: a row of a tile with one vector costs 3/4 of one with two, and each row as much as ten
    products of it besides. products: those of one pixel and one output, for each tap of the axis."""
    return ((3 if axis.block * outer <= lanes(array) else 4) * axis.taps * products + 40) * axis.pixels


@jit
def blocks_of(
    size: int, out: int, kernel: Pair, stride: int, padding: int, backward: bool, inner: int, outer: int, array: ndarray
) -> int:
    """How many pixels to compute as one."""
    products, best, least = kernel[0] * inner, 1, 0
    for remainder in range(stride if backward else 1):
        axis = forward_axis(size, out, kernel[1], stride, padding, max(1, 1))
        if backward:
            axis = gradient_axis(size, out, kernel[1], stride, padding, max(1, 1), remainder)
        least += _cost(axis, products, outer, array)
    for block in range(2, min(MOST, panel_width(array) // outer) + 1):
        if backward and block % stride:
            continue
        axis = forward_blocks(size, out, kernel[1], stride, padding, block)
        if backward:
            axis = gradient_blocks(size, out, kernel[1], stride, padding, block)
        cost = _cost(axis, products, outer, array)
        if cost < least:
            best, least = block, cost
    return best


@jit
def span(axis: Axis, outputs: int) -> int:
    """How many source pixels `outputs` neighbouring outputs look at, from the first to the last."""
    return (outputs - 1) * axis.step + (axis.taps - 1) * axis.spacing + 1


@jit
def inside(axis: Axis) -> bool:
    """Whether no output looks beyond the source's ends."""
    return axis.offset >= 0 and axis.offset + span(axis, axis.pixels) <= axis.source


@jit
def aligned(scratch: ndarray) -> ndarray:
    """From its first cache line on: a vector across two lines costs two loads."""
    return scratch[(-scratch.ctypes.data % 64) // scratch.itemsize :]


@jit
def _copy(source: ndarray, target: ndarray) -> None:
    for i in range(target.size):
        target[i] = source[i]


@jit
def _clear(target: ndarray) -> None:
    for i in range(target.size):
        target[i] = 0


@apart_jit
def copy_with_halo(
    image: ndarray, height: int, width: int, pixel: int,
    top: int, rows: int, left: int, columns: int, channel: int, channels: int, padded: int, target: ndarray,
) -> None:  # fmt: skip
    """target (rows, columns, padded) = image (height, width, pixel) from [top, left, channel] on; 0 outside of it.

    Both are vectors here. Of `padded` numbers a pixel, the first `channels` are written, unless that is all.
    """
    first, last = min(max(0, -left), columns), max(0, min(columns, width - left))
    last = max(first, last)
    for i in range(rows):
        row = target[i * columns * padded : (i + 1) * columns * padded]
        if top + i < 0 or top + i >= height:
            _clear(row)
            continue
        _clear(row[: first * padded])
        _clear(row[last * padded :])
        at = ((top + i) * width + left + first) * pixel + channel
        if channels == pixel and channels == padded:
            _copy(image[at : at + (last - first) * pixel], row[first * padded : last * padded])
            continue
        for j in range(last - first):
            start = (first + j) * padded
            _copy(image[at + j * pixel : at + j * pixel + channels], row[start : start + channels])
