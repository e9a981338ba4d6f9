"""The gradient of the weights on a GPU, as a matrix product whose long side is the sum (split-K).

    dweight (taps * C, O) = patches^T (taps * C, pixels) @ dy (pixels, O)

`patches` is the matrix of cuda_convolve.py, and is not stored either. There are few sums, each over all pixels of all
images. So the pixels are divided into parts. A block computes a tile of dweight for one group and one part. A second
kernel adds the parts in their order, so bits depend neither on the order of blocks nor on the GPU.

A tile of the patches is DEPTH pixels deep. Its rows are runs: `run` successive channels of a tap. In each tile a thread
copies several runs of one pixel, and then outputs of the same pixel. It copies the same runs in all tiles, so it knows
for each of them

    taken       the bits of its line and column of taps, as in cuda_taps.py
    distance    from the pixel of tap 0 to its numbers, in elements

What depends on the pixel is the same for all runs. A table in shared memory contains it for CHUNK pixels:

    at         where the pixel of tap 0 is in x, in elements
    outside    the bits of the lines and columns of taps that are outside the image
    dy_at      where the pixel of y is

So a run takes one addition and one test of two bits, and then only copies. If `run` does not divide the channels of a
group, the last run of a tap begins earlier: it repeats numbers of the previous one, which are not written twice.
A copy has 16 bytes, or one number if x is not aligned. A tile contains the first pieces of all runs, then the second
ones, and so on: neighbouring threads write neighbours.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import Kernel, cuda, device, kernel
from minidl.engine.cuda_memory import copy_16_if, copy_if, get, load4, put, shifted, store4

from ..matmul.cuda_loader import DEPTH, THREADS
from ..matmul.cuda_tile import VECTOR, Tile, positions
from .cuda_geometry import quotient, split
from .cuda_pipeline import Walk, pipeline, row_writer
from .cuda_taps import LINE, NOWHERE, bits_outside
from .reference import Pair, Shape

CHUNK = 256  # pixels in the table, a multiple of 2 * DEPTH
ENTRY = 4  # integers for each: at, outside, dy_at, and one that is not used
BEYOND = 1 << 15  # in `outside`: the pixel is not in the part
NEXT, B_AT, RUNS = 0, 1, 2  # positions in `state`: entry of the next pixel, outputs; then taken, distance of each run
PRODUCTS = 128  # pixels of a part, if there are enough blocks
LONGEST = 4096  # pixels of a part at most, since rounding errors grow with it
BLOCKS = 256  # at least so many blocks, if there are enough pixels


class Gradient(NamedTuple):
    """The geometry of a layer. A group has `inner` channels of x and `outer` channels of y."""

    groups: int
    inner: int
    outer: int
    source_h: int  # pixels of x
    source_w: int
    taps_h: int
    taps_w: int
    rows: int  # of dweight for a group: taps * inner
    out_h: int
    out_w: int
    pixels: int  # of y, in all images
    part: int  # pixels of a part
    stride_h: int
    stride_w: int
    padding_h: int
    padding_w: int
    spacing_h: int  # from tap to tap
    spacing_w: int
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
        groups, inner, outer, height, width, kernel_h, kernel_w, rows, *out, pixels, -(-part // DEPTH) * DEPTH, *stride,
        *padding, *dilation, span_h, span_w, move_h, move_w,
        move=((images * height + move_h) * width + move_w) * channels,
        line=(stride[0] * width - span_w) * channels,
        image=(height - span_h) * width * channels,
    )  # fmt: skip


class Runs(NamedTuple):
    """How the channels of a tap are divided. size: of a run; it is less than `run` if a group has fewer channels."""

    run: int
    size: int
    piece: int  # numbers that are copied together

    @property
    def place(self) -> Any:
        """A function of a run's number: its tap, its first channel, and how many channels it repeats."""
        run, size, _ = self

        @device
        def place(number: int, g: Gradient) -> tuple[int, int, int]:
            of_tap = quotient(int32(g.inner + run - 1), run)
            tap = quotient(number, of_tap)
            nominal = int32((number - tap * of_tap) * run)
            channel = int32(min(nominal, g.inner - size))
            return tap, channel, int32(nominal - channel)

        return place


def stride_of(length: int, together: int) -> int:
    """Return the stride between the pixels of a tile. A warp copies so many neighbours of each of its pixels together.

    With this stride it writes to 32 different banks.
    """
    return length + (together - length) % 32 if together < 32 else length


def pixels(tile: Tile, runs: Runs, b_piece: int) -> tuple[Walk, int]:
    """Return the walk from pixel to pixel, and the stride of b's tile. b_piece: outputs that are copied together."""
    lanes, (run, size, piece), place = tile.threads // DEPTH, runs, runs.place
    plane, copies = tile.rows // run * piece, tile.rows // run // lanes
    b_pieces = tile.columns // b_piece
    b_copies = -(-b_pieces // lanes)
    A_STRIDE, B_STRIDE = stride_of(tile.rows, lanes * piece), stride_of(tile.columns, min(lanes, b_pieces) * b_piece)
    OUTPUTS = RUNS + 2 * copies

    @device
    def start(state: ndarray, table: ndarray, g: Gradient, row0: int, column0: int, group: int) -> int:
        lane, channels = int32(cuda.threadIdx.x % lanes), int32(g.groups * g.inner)
        for r in range(copies):
            tap, channel, _ = place(int32(row0 // run + lane + lanes * r), g)
            u = quotient(tap, g.taps_w)
            v = int32(tap - u * g.taps_w)
            distance = int32((u * g.spacing_h * g.source_w + v * g.spacing_w) * channels + group * g.inner + channel)
            state[RUNS + 2 * r] = int32(1 << LINE + u | 1 << v) if u < g.taps_h else int32(NOWHERE)
            state[RUNS + 2 * r + 1] = distance
        for r in range(b_copies):
            column = int32(column0 + (lane + lanes * r) * b_piece)
            state[OUTPUTS + r] = int32(BEYOND) if column < g.outer else int32(NOWHERE)
        state[B_AT] = int32(group * g.outer + column0 + lane * b_piece)
        return int32(0)

    @device
    def fetch(
        sa: ndarray, sb: ndarray, half_a: int, half_b: int, state: ndarray, x: ndarray, dy: ndarray, table: ndarray,
        g: Gradient,
    ) -> None:  # fmt: skip
        k, lane = int32(cuda.threadIdx.x // lanes), int32(cuda.threadIdx.x % lanes)
        at, outside, dy_at, _ = load4(table, state[NEXT])
        state[NEXT] = int32(state[NEXT] + DEPTH * ENTRY)
        to_a, to_b = half_a + k * A_STRIDE + lane * piece, half_b + k * B_STRIDE + lane * b_piece
        sa, sb, dy = shifted(sa, to_a), shifted(sb, to_b), shifted(dy, state[B_AT])
        copy, b_copy = copy_if if piece == 1 else copy_16_if, copy_if if b_piece == 1 else copy_16_if
        for r in range(copies):
            read, source = outside & state[RUNS + 2 * r] == 0, shifted(x, state[RUNS + 2 * r + 1])
            for c in range(0, size, piece):
                copy(sa, lanes * piece * r + plane * (c // piece), source, at + c, read)
        if lanes <= b_pieces or lane < b_pieces:
            for r in range(b_copies):
                more = lanes * b_piece * r
                b_copy(sb, more, dy, dy_at + more, outside & state[OUTPUTS + r] == 0)

    return Walk(A_STRIDE, False, OUTPUTS + b_copies, (CHUNK + DEPTH) * ENTRY, start, fetch), B_STRIDE


@device
def write_table(table: ndarray, begin: int, stop: int, threads: int, g: Gradient) -> int:
    """Write the entries of the pixels from `begin` to `stop`. Return the number of tiles, which is even.

    One tile more has entries: `add_all` copies it.
    """
    tiles = int32((stop - begin + 2 * DEPTH - 1) // (2 * DEPTH) * 2)
    entry = int32(cuda.threadIdx.x)
    while entry < (tiles + 1) * DEPTH:
        pixel = int32(begin + entry)
        n, i, j = split(pixel, g.out_h, g.out_w)
        h, w = int32(i * g.stride_h - g.padding_h), int32(j * g.stride_w - g.padding_w)
        at = int32(((n * g.source_h + h) * g.source_w + w) * (g.groups * g.inner))
        outside = bits_outside(h, w, g) if pixel < stop else int32(-1)
        store4(table, entry * ENTRY, (at, outside, int32(pixel * (g.groups * g.outer)), int32(0)))
        entry = int32(entry + threads)
    cuda.syncthreads()  # the table is complete
    return tiles


@cache
def weight_gradient(tile: Tile, runs: Runs, wide: bool, item: int) -> Kernel:
    """Return the kernel for a tile. wide: dy and out are accessed by 16 bytes. item: bytes of an element."""
    ROWS, COLUMNS, HEIGHT, WIDTH, BLOCK = tile.rows, tile.columns, tile.height, tile.width, tile.threads
    walk, B_STRIDE = pixels(tile, runs, 16 // item if wide else 1)
    start, A_SIZE, B_SIZE = walk.start, 2 * DEPTH * walk.a_stride, 2 * DEPTH * B_STRIDE
    INTEGERS, ENTRIES, (RUN, SIZE, PIECE), place = walk.integers, walk.entries, runs, runs.place
    PLANE = ROWS // RUN * PIECE
    position, add_all, write = positions(COLUMNS // WIDTH), pipeline(tile, walk, B_STRIDE, True), row_writer(tile, wide)

    def weight_gradient(
        x: ndarray, dy: ndarray, out: ndarray,
        groups: int, inner: int, outer: int, source_h: int, source_w: int, taps_h: int, taps_w: int, rows: int,
        out_h: int, out_w: int, pixels: int, part: int, stride_h: int, stride_w: int, padding_h: int, padding_w: int,
        spacing_h: int, spacing_w: int, span_h: int, span_w: int, move_h: int, move_w: int, move: int, line: int,
        image: int,
    ) -> None:  # fmt: skip
        """out (parts, taps * C, O)"""
        g = Gradient(
            groups, inner, outer, source_h, source_w, taps_h, taps_w, rows, out_h, out_w, pixels, part, stride_h,
            stride_w, padding_h, padding_w, spacing_h, spacing_w, span_h, span_w, move_h, move_w, move, line, image,
        )  # fmt: skip
        sa, sb = cuda.shared.array(A_SIZE, x.dtype, 16), cuda.shared.array(B_SIZE, x.dtype, 16)
        table = cuda.shared.array(ENTRIES, int32, 16)
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
        begin = int32(number * g.part)
        stop = int32(min(begin + g.part, g.pixels))
        start(state, table, g, row0, column0, group)
        if SIZE < RUN:  # some rows are not copied
            at = int32(cuda.threadIdx.x)
            while at < A_SIZE:
                put(sa, at, x.dtype.type(0))
                at = int32(at + BLOCK)
        while begin < stop:
            tiles = write_table(table, begin, int32(min(begin + CHUNK, stop)), BLOCK, g)
            state[NEXT] = int32(cuda.threadIdx.x // (BLOCK // DEPTH) * ENTRY)
            add_all(sums, p, q, sa, sb, y * VECTOR, x_ * VECTOR, tiles, state, x, dy, table, g)
            begin = int32(begin + CHUNK)
        columns, channel0 = int32(g.outer - column0), int32(group * g.outer + column0)
        for i in range(HEIGHT):
            row = int32(y * VECTOR + i % VECTOR + i // VECTOR * (ROWS // 2))
            c = int32(row // PLANE * PIECE + row % PIECE)  # in its run
            tap, channel, repeated = place(int32(row0 // RUN + row % PLANE // PIECE), g)
            if tap < g.taps_h * g.taps_w and repeated <= c < SIZE:
                at = int32((number * g.rows + tap * g.inner + channel + c) * (g.groups * g.outer) + channel0)
                write(out, at, sums, i, int32(x_ * VECTOR), columns)

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
