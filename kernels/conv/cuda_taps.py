"""Copies tiles of a convolution to shared memory: eight channels of the source's pixels, for one tap after the other.

A tile's rows are pixels of out. One or two threads copy the eight numbers of a row: by 16 bytes, or one by one if they
are not aligned or registers are scarce. Then the tile is transposed on its way. These are `by_rows` and `along` of
matmul/cuda_loader.py. A thread keeps its rows for all tiles. For each row it knows

    outside    a bit for each column of taps that is beside the image, and one for each line above or below it
    pixel      where its numbers begin at the first tap

What depends on the tile is the same for all rows. The table contains it:

    at           the distance from the first tap to the tile's first channel, in elements
    tap          the bits of its column and line
    weight_at    where the weights of its first channel are
    channels     that it adds to the sums

So a row takes one addition and one test of two bits, and then only copies. Outside the image they write 0.
If 8 does not divide a group's channels, the first tile of each tap adds those that are left over. It copies 8 all the
same, since this takes no further tests; the weights of the others are 0.
"""

from __future__ import annotations

from typing import Any

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import cuda, device
from minidl.engine.cuda_memory import copy_16_if, copy_if, load4, shifted, store4

from ..matmul.cuda_loader import DEPTH, PADDING, Loader
from ..matmul.cuda_tile import VECTOR, Tile
from .cuda_geometry import Pass, inside, quotient, split
from .cuda_pipeline import ENTRY, Walk

CHUNK = 128  # tiles in the table
MOST = 15  # lines and columns of taps
LINE = 16  # the bit of the first line; that of the first column is 0
NOWHERE = -(1 << 31)  # a bit that each row has
NEXT, B_AT, PIXELS = 0, 1, 2  # positions in `state`: entry of the next tile, weights; then outside, pixel of each row


@device
def bits_outside(h: int, w: int, g: Any) -> int:
    """Return `outside` of a row that reads the pixel h, w at the first tap. g: a Pass or a Gradient"""
    bits = int32(NOWHERE)
    for u in range(g.taps_h):
        if not inside(h + u * g.spacing_h, 0, g.source_h, 1):
            bits = int32(bits | 1 << LINE + u)
    for v in range(g.taps_w):
        if not inside(0, w + v * g.spacing_w, 1, g.source_w):
            bits = int32(bits | 1 << v)
    return bits


@device
def keep_row(state: ndarray, at: int, m: int, channel: int, g: Pass) -> None:
    """Prepare `outside` and `pixel` of row m. at: their position in `state`. channel: of all groups."""
    n, i, j = split(m, g.pixels_h, g.pixels_w)
    h, w = int32(g.offset_h + i * g.step_h), int32(g.offset_w + j * g.step_w)
    state[at] = bits_outside(h, w, g) if n < g.images else int32(-1)
    state[at + 1] = int32(((n * g.source_h + h) * g.source_w + w) * (g.groups * g.inner) + channel)


def taps(tile: Tile, size: int, whole: bool, by_rows: bool, b_along: bool, b_loader: Loader) -> Walk:
    """Return the walk from tap to tap. size: channels of a group, at most DEPTH. whole: DEPTH divides their number.

    by_rows: copy 16 bytes, else numbers. b_along: the weights of successive k are neighbours. b_loader: of the weights.
    """
    rows, columns, threads = tile.rows, tile.columns, tile.threads
    lanes = 2 if by_rows or rows < threads else 1  # threads that copy one row
    numbers, SWEEP = DEPTH // lanes, threads // lanes
    stride, sweeps = DEPTH if by_rows else rows + PADDING, -(-rows // SWEEP)
    B_STRIDE, first_b, fetch_b, fetch_part_b = b_loader
    fetch_weights = fetch_b if whole else fetch_part_b

    @device
    def mine(thread: int) -> tuple[int, int]:
        """Return (k, row): the thread's first element in a tile."""
        return int32(thread % lanes * numbers), int32(thread // lanes)

    @device
    def start(state: ndarray, g: Pass, row0: int, column0: int, group: int) -> int:
        thread = int32(cuda.threadIdx.x)
        k, row = mine(thread)
        for r in range(sweeps):
            keep_row(state, PIXELS + 2 * r, int32(row0 + row + SWEEP * r), int32(group * g.inner + k), g)
        bk, bi = first_b(thread)
        if b_along:
            state[B_AT] = int32(g.weight + (column0 + bi) * (g.groups * g.inner) + group * g.inner + bk)
        else:
            state[B_AT] = int32(g.weight + bk * g.weight_channel + group * g.outer + column0 + bi)
        return int32(g.taps_h * g.taps_w * ((g.inner + DEPTH - 1) // DEPTH))

    @device
    def fill(state: ndarray, table: ndarray, g: Pass, begin: int, count: int) -> None:
        of_tap, entry = int32((g.inner + DEPTH - 1) // DEPTH), int32(cuda.threadIdx.x)
        first = int32(g.inner - (of_tap - 1) * DEPTH)  # channels of the first tile of a tap
        while entry <= count:
            tap = quotient(int32(begin + entry), of_tap)
            number = int32(begin + entry - tap * of_tap)
            u = quotient(tap, g.taps_w)
            v = int32(tap - u * g.taps_w)
            channel = int32(max(first + (number - 1) * DEPTH, 0))
            at = int32((u * g.spacing_h * g.source_w + v * g.spacing_w) * (g.groups * g.inner) + channel)
            weight_at = int32(u * g.weight_down + v * g.weight_right + channel * g.weight_channel)
            if entry < count:
                left = int32(DEPTH) if number > 0 else first
                store4(table, entry * ENTRY, (at, int32(1 << LINE + u | 1 << v), weight_at, left))
            else:
                store4(table, entry * ENTRY, (int32(0), int32(NOWHERE), int32(0), int32(0)))
            entry = int32(entry + threads)
        state[NEXT] = int32(0)

    @device
    def fetch(
        sa: ndarray, sb: ndarray, half_a: int, half_b: int, state: ndarray, source: ndarray, weight: ndarray,
        table: ndarray, g: Pass,
    ) -> None:  # fmt: skip
        thread, column0 = int32(cuda.threadIdx.x), int32(cuda.blockIdx.y * columns)
        k, row = mine(thread)
        at, tap, weight_at, left = load4(table, state[NEXT])
        state[NEXT] = int32(state[NEXT] + ENTRY)
        if SWEEP <= rows or row < rows:
            to = shifted(sa, half_a + (row * DEPTH + (k ^ row & VECTOR) if by_rows else k * stride + row))
            for r in range(sweeps):
                read, pixel = state[PIXELS + 2 * r] & tap == 0, shifted(source, state[PIXELS + 2 * r + 1])
                if by_rows:
                    copy_16_if(to, SWEEP * DEPTH * r, pixel, at, read and (size == DEPTH or k < size))
                else:
                    for q in range(numbers):
                        wanted = read and (size == DEPTH or k + q < size)
                        copy_if(to, stride * q + SWEEP * r, pixel, at + q, wanted)
        (bk, bi), b_step = first_b(thread), int32(g.groups * g.inner) if b_along else g.weight_channel
        to, b_size, weight = half_b + bk * B_STRIDE + bi, int32(g.outer - column0), shifted(weight, state[B_AT])
        fetch_weights(sb, to, weight, weight_at, b_step, bk, bi, b_size, left)

    return Walk(stride, B_STRIDE, by_rows, PIXELS + 2 * sweeps, (CHUNK + 1) * ENTRY, CHUNK, start, fill, fetch)
