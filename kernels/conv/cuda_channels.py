"""Convolutions with few channels in each group (depthwise: one) on a GPU. Such layers wait for memory.

A tile of a matrix product would be nearly empty. So a thread computes one output, and reads its numbers directly.
Neighbouring threads compute neighbouring channels: a warp reads and writes neighbouring numbers. The pixels that
several taps read come from the caches.
"""

from __future__ import annotations

from functools import cache

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import Kernel, cuda, kernel
from minidl.engine.cuda_memory import get, put

from ..matmul.cuda_loader import DEPTH, THREADS
from .cuda_convolve import added, scaled
from .cuda_geometry import Pass, inside, place, quotient, split
from .cuda_weight import PIXELS, Gradient, advance, first

COLUMNS = 32  # of dweight for a block
INTEGERS = PIXELS + 3


@cache
def convolve_channels(backward: bool) -> Kernel:
    """Return the kernel of forward, or of the gradient with respect to the images. A thread computes one number."""

    def convolve_channels(
        source: ndarray, weight: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool,
        out: ndarray,
        images: int, groups: int, inner: int, outer: int, source_h: int, source_w: int, out_h: int, out_w: int,
        pixels_h: int, pixels_w: int, first_h: int, first_w: int, stride_h: int, stride_w: int, step_h: int,
        step_w: int, offset_h: int, offset_w: int, spacing_h: int, spacing_w: int, taps_h: int, taps_w: int,
        right: int, down: int, weight_: int, weight_channel: int, weight_next: int, weight_right: int, weight_down: int,
    ) -> None:  # fmt: skip
        g = Pass(
            images, groups, inner, outer, source_h, source_w, out_h, out_w, pixels_h, pixels_w, first_h, first_w,
            stride_h, stride_w, step_h, step_w, offset_h, offset_w, spacing_h, spacing_w, taps_h, taps_w, right, down,
            weight_, weight_channel, weight_next, weight_right, weight_down,
        )  # fmt: skip
        number, outputs, channels = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x), groups * outer, groups * inner
        row = quotient(number, outputs)
        o = int32(number - row * outputs)
        group = quotient(o, outer)
        n, i, j = split(row, pixels_h, pixels_w)
        if n < images:
            at_weight = int32(weight_ + ((o - group * outer) * channels + group * inner if backward else o))
            padded = int32((inner + DEPTH - 1) // DEPTH * weight_next)  # weight_right begins behind a whole tile
            total = source.dtype.type(0)
            for u in range(taps_h):
                h = int32(offset_h + i * step_h + u * spacing_h)
                for v in range(taps_w):
                    w = int32(offset_w + j * step_w + v * spacing_w)
                    if inside(h, w, source_h, source_w):
                        at = int32(((n * source_h + h) * source_w + w) * channels + group * inner)
                        for c in range(inner):
                            total += get(source, at + c) * get(weight, at_weight + c * weight_channel)
                    at_weight = int32(at_weight + padded + weight_right)
                at_weight = int32(at_weight + weight_down)
            at = int32(place(g, row) * outputs + o)
            put(out, at, added(scaled(total, o, bias, scale, shift), at, shortcut, relu))

    return kernel(THREADS)(convolve_channels)


@kernel(THREADS)
def weight_gradient_channels(
    x: ndarray, dy: ndarray, out: ndarray,
    groups: int, inner: int, outer: int, height: int, width: int, kernel_w: int, rows: int, out_h: int, out_w: int,
    pixels: int, part: int, stride_h: int, stride_w: int, padding_h: int, padding_w: int, dilation_h: int,
    dilation_w: int, span_h: int, span_w: int, move_h: int, move_w: int, move: int, line: int, image: int,
) -> None:  # fmt: skip
    """out (parts, taps * C, O). A block sums the pixels of a part for COLUMNS numbers; a warp takes every eighth."""
    g = Gradient(
        groups, inner, outer, height, width, kernel_w, rows, out_h, out_w, pixels, part, stride_h, stride_w,
        padding_h, padding_w, dilation_h, dilation_w, span_h, span_w, move_h, move_w, move, line, image,
    )  # fmt: skip
    sums = cuda.shared.array(THREADS, x.dtype)
    state = cuda.local.array(INTEGERS, int32)
    thread, row, number = int32(cuda.threadIdx.x), int32(cuda.blockIdx.y), int32(cuda.blockIdx.z)
    outputs, o = int32(groups * outer), int32(cuda.blockIdx.x * COLUMNS + thread % COLUMNS)
    total = x.dtype.type(0)
    if o < outputs:
        tap = quotient(row, inner)
        m = int32(number * part + thread // COLUMNS)
        first(state, PIXELS, m, tap, int32(quotient(o, outer) * inner + row - tap * inner), g)
        stop = int32(min(pixels, (number + 1) * part))
        while m < stop:
            if inside(state[PIXELS], state[PIXELS + 1], height, width):
                total += get(x, state[PIXELS + 2]) * get(dy, m * outputs + o)
            m = int32(m + DEPTH)
            advance(state, PIXELS, g)
    put(sums, thread, total)
    cuda.syncthreads()
    if thread < COLUMNS and o < outputs:
        for warp in range(1, DEPTH):
            total += get(sums, warp * COLUMNS + thread)
        put(out, (number * rows + row) * outputs + o, total)
