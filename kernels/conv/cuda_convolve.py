"""The kernel of convolutions on a GPU, and of their gradients with respect to the images: a matrix product without a
matrix (implicit GEMM).

    out (pixels, O) = patches (pixels, taps * C) @ weight (taps * C, O)

A row of `patches` contains all numbers that a pixel of out reads. It is never stored: the copies to shared memory read
it from the image (cuda_taps.py, cuda_few.py). A block of threads computes a tile of out: so many pixels x so many
channels of one group. A thread computes the same part of it as in matmul/cuda_tile.py, whose inner loop it uses.
"""

from __future__ import annotations

from functools import cache

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import Kernel, cuda, device, kernel
from minidl.engine.cuda_memory import get

from ..matmul.cuda_loader import DEPTH, across, along, elements
from ..matmul.cuda_tile import VECTOR, Tile, places, positions
from .cuda_few import few
from .cuda_geometry import Pass, place
from .cuda_pipeline import pipeline, row_writer
from .cuda_taps import taps


@device
def scaled(total: float, o: int, bias: ndarray, scale: ndarray, shift: ndarray) -> float:
    """Return total [+ bias[o]] [* scale[o] + shift[o]]."""
    if bias.size > 0:
        total = total + get(bias, o)
    if scale.size > 0:
        total = total * get(scale, o) + get(shift, o)
    return total


@device
def added(total: float, at: int, shortcut: ndarray, relu: bool) -> float:
    """Return total [+ shortcut[at]] [relu]."""
    if shortcut.size > 0:
        total = total + get(shortcut, at)
    return type(total)(0) if relu and total < 0 else total


@cache
def convolution(tile: Tile, has_few: bool, whole: bool, by_rows: bool, backward: bool, wide: bool, item: int) -> Kernel:
    """Return the kernel for a tile. has_few: use cuda_few.py, else cuda_taps.py. backward: compute the gradient.

    whole: DEPTH divides the number of source's channels in a group. by_rows: they are copied by 16 bytes.
    wide: out is written, and in forward the weights are copied, by 16 bytes. item: bytes of an element.
    """
    ROWS, COLUMNS, HEIGHT, WIDTH = tile.rows, tile.columns, tile.height, tile.width
    loader = (along if backward else across if wide else elements)(COLUMNS, item, tile.threads)
    B_STRIDE = loader[0]
    walk = few(tile, loader) if has_few else taps(tile, whole, by_rows, backward, loader)
    start, A_SIZE, B_SIZE = walk.start, 2 * (ROWS if by_rows else DEPTH) * walk.a_stride, 2 * DEPTH * B_STRIDE
    INTEGERS, ENTRIES, P_SHAPE = walk.integers, max(VECTOR, walk.entries), (HEIGHT, VECTOR) if by_rows else HEIGHT
    position, add_all, write = positions(COLUMNS // WIDTH), pipeline(tile, walk, B_STRIDE), row_writer(tile, wide)
    begin, row_of = places(tile, by_rows)

    @device
    def finish(
        out: ndarray, sums: ndarray, i: int, row0: int, y: int, first: int, size: int, channel0: int, shortcut: ndarray,
        relu: bool, g: Pass,
    ) -> None:  # fmt: skip
        """Write row i of the sums. (The compiler would not unroll a loop over rows, and keep the sums in memory.)"""
        m = int32(row0 + row_of(y, i))
        if m < g.images * g.pixels_h * g.pixels_w:
            at = int32(place(g, m) * (g.groups * g.outer) + channel0)
            if relu or shortcut.size > 0:
                for j in range(WIDTH):
                    n = int32(first + j % VECTOR + j // VECTOR * (COLUMNS // 2))
                    if n < size:
                        sums[i, j] = added(sums[i, j], at + n, shortcut, relu)
            write(out, at, sums, i, first, size)

    def convolve(
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
        sa, sb = cuda.shared.array(A_SIZE, source.dtype, 16), cuda.shared.array(B_SIZE, source.dtype, 16)
        table = cuda.shared.array(ENTRIES, int32, 16)
        sums = cuda.local.array((HEIGHT, WIDTH), source.dtype)
        p, q = cuda.local.array(P_SHAPE, source.dtype), cuda.local.array(WIDTH, source.dtype)
        state = cuda.local.array(INTEGERS, int32)
        for i in range(HEIGHT):
            for j in range(WIDTH):
                sums[i, j] = 0
        y, x = position(int32(cuda.threadIdx.x))
        row0, column0, group = int32(cuda.blockIdx.x * ROWS), int32(cuda.blockIdx.y * COLUMNS), int32(cuda.blockIdx.z)
        tiles = start(state, table, g, row0, column0, group)
        add_all(sums, p, q, sa, sb, begin(y), x * VECTOR, tiles, state, source, weight, table, g)

        size, first, channel0 = int32(g.outer - column0), int32(x * VECTOR), int32(group * g.outer + column0)
        if bias.size > 0 or scale.size > 0:
            for j in range(WIDTH):
                n = int32(first + j % VECTOR + j // VECTOR * (COLUMNS // 2))
                if n < size:
                    for i in range(HEIGHT):
                        sums[i, j] = scaled(sums[i, j], channel0 + n, bias, scale, shift)
        finish(out, sums, 0, row0, y, first, size, channel0, shortcut, relu, g)
        finish(out, sums, 1, row0, y, first, size, channel0, shortcut, relu, g)
        finish(out, sums, 2, row0, y, first, size, channel0, shortcut, relu, g)
        finish(out, sums, 3, row0, y, first, size, channel0, shortcut, relu, g)
        if HEIGHT == 8:
            finish(out, sums, 4, row0, y, first, size, channel0, shortcut, relu, g)
            finish(out, sums, 5, row0, y, first, size, channel0, shortcut, relu, g)
            finish(out, sums, 6, row0, y, first, size, channel0, shortcut, relu, g)
            finish(out, sums, 7, row0, y, first, size, channel0, shortcut, relu, g)

    return kernel(tile.threads, tile.blocks_per_sm)(convolve)
