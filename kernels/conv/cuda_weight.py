"""The gradient of the weights on a GPU, as a matrix product whose long side is the sum (split-K).

    dweight (taps * C, O) = patches^T (taps * C, pixels) @ dy (pixels, O)

`patches` is the matrix of cuda_convolve.py, and is not stored either. There are few sums, each over all pixels of all
images. So the pixels are divided into parts. A block of 256 threads computes a tile of dweight for one group and one
part. A second kernel adds the parts in their order, so bits depend neither on the order of blocks nor on the GPU.

A tile of the patches is DEPTH pixels deep. A thread copies numbers of one tap and channel (or of four successive
channels) for one pixel or more, and keeps the tap from the first tile to the last. For each of its pixels it knows

    h, w    the pixel of x that the tap reads
    at      where the number is

From tile to tile, a pixel moves on by DEPTH outputs. It does so without divisions: the host computes the distance, and
a pixel that is beyond the last output of a line (or image) is moved to the next line (or image).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import Kernel, cuda, device, kernel
from minidl.engine.cuda_memory import copy_16_if, copy_if, get, put

from ..matmul.cuda_loader import DEPTH, THREADS, Loader, across, elements
from ..matmul.cuda_tile import VECTOR, Tile, positions
from .cuda_geometry import inside, quotient, split
from .cuda_pipeline import Walk, pipeline, row_writer
from .cuda_taps import add
from .reference import Pair, Shape

FAR = -(1 << 29)  # h of a pixel that no thread reads
LEFT, B_AT, END_H, END_W, PIXELS = 0, 1, 2, 3, 4  # positions in `state`; then h, w, at for each pixel
PRODUCTS = 128  # pixels of a part, if there are enough blocks
LONGEST = 4096  # pixels of a part at most, since rounding errors grow with it
BLOCKS = 256  # at least so many blocks, if there are enough pixels


class Gradient(NamedTuple):
    """The geometry of a layer. A group has `inner` channels of x and `outer` channels of y."""

    groups: int
    inner: int
    outer: int
    height: int  # pixels of x
    width: int
    kernel_w: int
    rows: int  # of dweight for a group: taps * inner
    out_h: int
    out_w: int
    pixels: int  # of y, in all images
    part: int  # pixels of a part
    stride_h: int
    stride_w: int
    padding_h: int
    padding_w: int
    dilation_h: int
    dilation_w: int
    span_h: int  # from the first output of an image to the first behind its last one, in pixels of x
    span_w: int
    move_h: int  # from an output to the one that is DEPTH further, on the same line and image: in pixels of x
    move_w: int
    move: int  # in elements of x
    line: int  # from behind the last output of a line to the first of the next, in elements
    image: int  # and from image to image

    @property
    def parts(self) -> int:
        return -(-self.pixels // self.part)


def gradient_of(
    x_shape: Shape, w_shape: Shape, out: Pair, groups: int, stride: Pair, padding: Pair, dilation: Pair
) -> Gradient:
    """Return the geometry. The parts depend on the shapes only, since bits depend on them."""
    (_, height, width, channels), (kernel_h, kernel_w, inner, outputs) = x_shape, w_shape
    rows, outer, pixels = kernel_h * kernel_w * inner, outputs // groups, x_shape[0] * out[0] * out[1]
    tiles = -(-rows // 128) * -(-outer // 64) * groups
    part = max(PRODUCTS, min(-(-pixels * tiles // BLOCKS), LONGEST))
    span_h, span_w = out[0] * stride[0], out[1] * stride[1]
    images, lines, columns = DEPTH // (out[0] * out[1]), DEPTH // out[1] % out[0], DEPTH % out[1]
    move_h, move_w = lines * stride[0], columns * stride[1]
    return Gradient(
        groups, inner, outer, height, width, kernel_w, rows, *out, pixels, -(-part // DEPTH) * DEPTH, *stride,
        *padding, *dilation, span_h, span_w, move_h, move_w,
        move=((images * height + move_h) * width + move_w) * channels,
        line=(stride[0] * width - span_w) * channels,
        image=(height - span_h) * width * channels,
    )  # fmt: skip


@device
def advance(state: ndarray, pixel: int, g: Gradient) -> None:
    """Move a pixel on by DEPTH outputs. pixel: the position of its h, w, at in `state`."""
    h, w, at = int32(state[pixel] + g.move_h), int32(state[pixel + 1] + g.move_w), int32(state[pixel + 2] + g.move)
    if w >= state[END_W]:
        h, w, at = int32(h + g.stride_h), int32(w - g.span_w), int32(at + g.line)
    if h >= state[END_H]:
        h, at = int32(h - g.span_h), int32(at + g.image)
    state[pixel], state[pixel + 1], state[pixel + 2] = h, w, at


@device
def first(state: ndarray, pixel: int, number: int, tap: int, channel: int, g: Gradient) -> None:
    """Prepare the h, w, at of a pixel of y, END_H and END_W for a tap. channel: of all groups."""
    u = quotient(tap, g.kernel_w)
    up, left = int32(u * g.dilation_h - g.padding_h), int32((tap - u * g.kernel_w) * g.dilation_w - g.padding_w)
    n, i, j = split(number, g.out_h, g.out_w)
    h, w = int32(i * g.stride_h + up), int32(j * g.stride_w + left)
    state[END_H], state[END_W] = int32(g.span_h + up), int32(g.span_w + left)
    at = ((n * g.height + h) * g.width + w) * (g.groups * g.inner) + channel
    state[pixel], state[pixel + 1], state[pixel + 2] = h, w, int32(at)


def pixels(tile: Tile, vector: int, b_loader: Loader) -> Walk:
    """Return the walk from pixel to pixel. vector: channels that are copied together."""
    rows, columns, threads = tile.rows, tile.columns, tile.threads
    lanes = rows // vector  # threads that copy one pixel
    sweep = threads // lanes  # pixels that all threads copy at once
    copies = -(-DEPTH // sweep)
    copy = copy_if if vector == 1 else copy_16_if
    B_STRIDE, first_b, _, fetch_b = b_loader

    @device
    def start(state: ndarray, table: ndarray, g: Gradient, row0: int, column0: int, group: int) -> int:
        thread, outputs = int32(cuda.threadIdx.x), int32(g.groups * g.outer)
        begin = int32(quotient(int32(cuda.blockIdx.z), g.groups) * g.part)
        state[LEFT] = int32(min(g.part, g.pixels - begin))
        row = int32(row0 + thread % lanes * vector)
        tap = quotient(row, g.inner)
        channel = int32(group * g.inner + row - tap * g.inner)
        for r in range(copies):
            first(state, PIXELS + 3 * r, int32(begin + thread // lanes + sweep * r), tap, channel, g)
            if row >= g.rows:
                state[PIXELS + 3 * r] = int32(FAR)
        bk, bi = first_b(thread)
        state[B_AT] = int32((begin + bk) * outputs + group * g.outer + column0 + bi)
        return int32((state[LEFT] + DEPTH - 1) // DEPTH)

    @device
    def fetch(
        sa: ndarray, sb: ndarray, half_a: int, half_b: int, state: ndarray, x: ndarray, dy: ndarray, table: ndarray,
        g: Gradient,
    ) -> None:  # fmt: skip
        thread, column0 = int32(cuda.threadIdx.x), int32(cuda.blockIdx.y * columns)
        k, i = int32(thread // lanes), int32(thread % lanes * vector)
        if sweep <= DEPTH or k < DEPTH:
            for r in range(copies):
                h, w, at = state[PIXELS + 3 * r], state[PIXELS + 3 * r + 1], state[PIXELS + 3 * r + 2]
                wanted = inside(h, w, g.height, g.width) and k + sweep * r < state[LEFT]
                copy(sa, half_a + (k + sweep * r) * rows + i, x, at, wanted)
        bk, bi = first_b(thread)
        outputs = int32(g.groups * g.outer)
        to = int32(half_b + bk * B_STRIDE + bi)
        fetch_b(sb, to, dy, state[B_AT], outputs, bk, bi, int32(g.outer - column0), state[LEFT])
        add(state, LEFT, -DEPTH)
        add(state, B_AT, DEPTH * outputs)
        for r in range(copies):
            advance(state, PIXELS + 3 * r, g)

    return Walk(rows, False, PIXELS + 3 * copies, 0, start, fetch)


@cache
def weight_gradient(tile: Tile, vector: int, wide: bool, item: int) -> Kernel:
    """Return the kernel for a tile. vector: channels of x that are copied together. wide: dy and out by 16 bytes."""
    ROWS, COLUMNS, HEIGHT, WIDTH = tile.rows, tile.columns, tile.height, tile.width
    loader = (across if wide else elements)(COLUMNS, item, tile.threads)
    walk = pixels(tile, vector, loader)
    start, A_SIZE, B_SIZE, INTEGERS = walk.start, 2 * DEPTH * walk.a_stride, 2 * DEPTH * loader[0], walk.integers
    position, add_all, write = positions(COLUMNS // WIDTH), pipeline(tile, walk, loader[0]), row_writer(tile, wide)

    def weight_gradient(
        x: ndarray, dy: ndarray, out: ndarray,
        groups: int, inner: int, outer: int, height: int, width: int, kernel_w: int, rows: int, out_h: int, out_w: int,
        pixels: int, part: int, stride_h: int, stride_w: int, padding_h: int, padding_w: int, dilation_h: int,
        dilation_w: int, span_h: int, span_w: int, move_h: int, move_w: int, move: int, line: int, image: int,
    ) -> None:  # fmt: skip
        """out (parts, taps * C, O)"""
        g = Gradient(
            groups, inner, outer, height, width, kernel_w, rows, out_h, out_w, pixels, part, stride_h, stride_w,
            padding_h, padding_w, dilation_h, dilation_w, span_h, span_w, move_h, move_w, move, line, image,
        )  # fmt: skip
        sa, sb = cuda.shared.array(A_SIZE, x.dtype, 16), cuda.shared.array(B_SIZE, x.dtype, 16)
        sums = cuda.local.array((HEIGHT, WIDTH), x.dtype)
        p, q = cuda.local.array(HEIGHT, x.dtype), cuda.local.array(WIDTH, x.dtype)
        state = cuda.local.array(INTEGERS, int32)
        for i in range(HEIGHT):
            for j in range(WIDTH):
                sums[i, j] = 0
        y, x_ = position(int32(cuda.threadIdx.x))
        row0, column0, z = int32(cuda.blockIdx.x * ROWS), int32(cuda.blockIdx.y * COLUMNS), int32(cuda.blockIdx.z)
        number = quotient(z, g.groups)  # of the part
        group = int32(z - number * g.groups)
        tiles = start(state, state, g, row0, column0, group)
        add_all(sums, p, q, sa, sb, y * VECTOR, x_ * VECTOR, tiles, state, x, dy, state, g)
        size, channel0 = int32(g.outer - column0), int32(group * g.outer + column0)
        for i in range(HEIGHT):
            row = int32(row0 + y * VECTOR + i % VECTOR + i // VECTOR * (ROWS // 2))
            if row < g.rows:
                at = int32((number * g.rows + row) * (g.groups * g.outer) + channel0)
                write(out, at, sums, i, int32(x_ * VECTOR), size)

    return kernel(tile.threads, tile.blocks_per_sm)(weight_gradient)


@kernel()
def sum_parts(partial: ndarray, out: ndarray) -> None:
    """out = the sum of the parts, in their order. A thread computes one element."""
    i, size = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x), int32(out.size)
    if i < size:
        total = get(partial, i)
        at = int32(i + size)
        while at < partial.size:
            total += get(partial, at)
            at = int32(at + size)
        put(out, i, total)
