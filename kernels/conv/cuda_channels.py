"""Convolutions with few channels in each group (depthwise: one) on a GPU. Such layers wait for memory.

A tile of a matrix product would be nearly empty. So a thread computes one output, and reads its numbers directly.
Neighbouring threads compute neighbouring channels: a warp reads and writes neighbouring numbers. The pixels that
several taps read come from the caches.
"""

from __future__ import annotations

from functools import cache

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import Kernel, cuda, device, kernel
from minidl.engine.cuda_memory import get, put

from ..matmul.cuda_loader import DEPTH, THREADS
from .cuda_convolve import added, scaled
from .cuda_geometry import Pass, inside, place, quotient, split
from .cuda_weight import Gradient

COLUMNS = 32  # of dweight for a block
H, W, AT, END_H, END_W, INTEGERS = 0, 1, 2, 3, 4, 5  # positions in `state`, see `first`


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


@device
def first(state: ndarray, number: int, tap: int, channel: int, g: Gradient) -> None:
    """Prepare the pixel of x that a tap reads for a pixel of y. channel: of all groups.

    H, W: its line and column. AT: where the number is. END_H, END_W: behind the last line and column.
    """
    u = quotient(tap, g.taps_w)
    up, left = int32(u * g.spacing_h - g.padding_h), int32((tap - u * g.taps_w) * g.spacing_w - g.padding_w)
    n, i, j = split(number, g.out_h, g.out_w)
    h, w = int32(i * g.stride_h + up), int32(j * g.stride_w + left)
    state[H], state[W], state[END_H], state[END_W] = h, w, int32(g.span_h + up), int32(g.span_w + left)
    state[AT] = int32(((n * g.source_h + h) * g.source_w + w) * (g.groups * g.inner) + channel)


@device
def advance(state: ndarray, g: Gradient) -> None:
    """Move on by DEPTH pixels of y. A pixel beyond the last one of a line or image moves to the next line or image."""
    h, w, at = int32(state[H] + g.move_h), int32(state[W] + g.move_w), int32(state[AT] + g.move)
    if w >= state[END_W]:
        h, w, at = int32(h + g.stride_h), int32(w - g.span_w), int32(at + g.line)
    if h >= state[END_H]:
        h, at = int32(h - g.span_h), int32(at + g.image)
    state[H], state[W], state[AT] = h, w, at


@kernel(THREADS)
def weight_gradient_channels(
    x: ndarray, dy: ndarray, out: ndarray,
    groups: int, inner: int, outer: int, source_h: int, source_w: int, taps_h: int, taps_w: int, rows: int,
    out_h: int, out_w: int, pixels: int, part: int, stride_h: int, stride_w: int, padding_h: int, padding_w: int,
    spacing_h: int, spacing_w: int, span_h: int, span_w: int, move_h: int, move_w: int, move: int, line: int,
    image: int,
) -> None:  # fmt: skip
    """out (parts, taps * C, O). A block sums the pixels of a part for COLUMNS numbers; a warp takes every eighth."""
    g = Gradient(
        groups, inner, outer, source_h, source_w, taps_h, taps_w, rows, out_h, out_w, pixels, part, stride_h,
        stride_w, padding_h, padding_w, spacing_h, spacing_w, span_h, span_w, move_h, move_w, move, line, image,
    )  # fmt: skip
    sums = cuda.shared.array(THREADS, x.dtype)
    state = cuda.local.array(INTEGERS, int32)
    thread, row, number = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x), int32(cuda.blockIdx.z)
    outputs, o = int32(groups * outer), int32(cuda.blockIdx.y * COLUMNS + thread % COLUMNS)
    total = x.dtype.type(0)
    if o < outputs:
        tap = quotient(row, inner)
        m = int32(number * part + thread // COLUMNS)
        first(state, m, tap, int32(quotient(o, outer) * inner + row - tap * inner), g)
        stop = int32(min(pixels, (number + 1) * part))
        while m < stop:
            if inside(state[H], state[W], source_h, source_w):
                total += get(x, state[AT]) * get(dy, m * outputs + o)
            m = int32(m + DEPTH)
            advance(state, g)
    put(sums, thread, total)
    cuda.syncthreads()
    if thread < COLUMNS and o < outputs:
        for warp in range(1, DEPTH):
            total += get(sums, warp * COLUMNS + thread)
        put(out, (number * rows + row) * outputs + o, total)
