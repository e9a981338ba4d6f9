"""Copies tiles of a convolution to shared memory: eight channels of the source's pixels, for one tap after the other.

A tile's rows are pixels of out. Two threads copy the eight numbers of a row, four each: by 16 bytes, or, if the numbers
are not aligned or registers are scarce, one by one. Then the tile is transposed on its way. These are `by_rows` and
`along` of matmul/cuda_loader.py. A thread keeps its rows for all tiles. For each row it knows

    at         where its numbers begin at the first tap
    outside    a bit for each column of taps that is beside the image, and one for each line above or below it

All rows move from tap to tap by the same distance. So a tile needs no divisions, and a row one addition and one test of
two bits. Outside the image the copies write 0.
If a group has C channels and 8 does not divide C, the last tile of each tap contains zeros.
"""

from __future__ import annotations

from typing import Any

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import cuda, device
from minidl.engine.cuda_memory import copy_16_if, copy_if

from ..matmul.cuda_loader import DEPTH, PADDING, SUCCESSIVE, Loader
from ..matmul.cuda_tile import VECTOR, Tile
from .cuda_geometry import Pass, inside, split
from .cuda_pipeline import Walk

LANES = DEPTH // SUCCESSIVE  # threads that copy one row
MOST = 15  # lines and columns of taps
LINE = 16  # the bit of the first line; that of the first column is 0
NOWHERE = -(1 << 31)  # a bit that each row has
# Positions in `state`: channel, distance from the first tap, weight, the bits of the tap's column, of its line, and
# behind the last column; then outside and at of each row
CHANNEL, MOVED, B_AT, ACROSS, DOWN, END, PIXELS = 0, 1, 2, 3, 4, 5, 6


def sweep_of(tile: Tile) -> int:
    """Return how many rows all threads copy at once."""
    return tile.threads // LANES


@device
def add(state: ndarray, position: int, number: int) -> None:
    state[position] = int32(state[position] + number)


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


def taps(tile: Tile, whole: bool, by_rows: bool, b_along: bool, b_loader: Loader) -> Walk:
    """Return the walk from tap to tap. whole: DEPTH divides the number of channels of a group.

    by_rows: copy 16 bytes, else numbers. b_along: the weights of successive k are neighbours. b_loader: of the weights.
    """
    rows, columns, SWEEP = tile.rows, tile.columns, sweep_of(tile)
    stride, sweeps = DEPTH if by_rows else rows + PADDING, -(-rows // SWEEP)
    B_STRIDE, first_b, fetch_b, fetch_part_b = b_loader
    fetch_weights = fetch_b if whole else fetch_part_b
    straight = whole and not b_along  # the weights of all taps follow one another

    @device
    def mine(thread: int) -> tuple[int, int]:
        """Return (k, row): the thread's first element in a tile."""
        return int32(thread % LANES * SUCCESSIVE), int32(thread // LANES)

    @device
    def start(state: ndarray, table: ndarray, g: Pass, row0: int, column0: int, group: int) -> int:
        thread = int32(cuda.threadIdx.x)
        k, row = mine(thread)
        channels = int32(g.groups * g.inner)
        for r in range(sweeps):
            m = int32(row0 + row + SWEEP * r)
            n, i, j = split(m, g.pixels_h, g.pixels_w)
            h, w = int32(g.offset_h + i * g.step_h), int32(g.offset_w + j * g.step_w)
            state[PIXELS + 2 * r] = bits_outside(h, w, g) if n < g.images else int32(-1)
            state[PIXELS + 2 * r + 1] = int32(((n * g.source_h + h) * g.source_w + w) * channels + group * g.inner + k)
        bk, bi = first_b(thread)
        if b_along:
            at = int32(g.weight + (column0 + bi) * channels + group * g.inner + bk)
        else:
            at = int32(g.weight + bk * g.weight_channel + group * g.outer + column0 + bi)
        state[CHANNEL], state[MOVED], state[B_AT] = int32(0), int32(0), at
        state[ACROSS], state[DOWN], state[END] = int32(1), int32(1 << LINE), int32(1 << g.taps_w)
        return int32(g.taps_h * g.taps_w * ((g.inner + DEPTH - 1) // DEPTH))

    @device
    def fetch(
        sa: ndarray, sb: ndarray, half_a: int, half_b: int, state: ndarray, source: ndarray, weight: ndarray,
        table: ndarray, g: Pass,
    ) -> None:  # fmt: skip
        thread, column0 = int32(cuda.threadIdx.x), int32(cuda.blockIdx.y * columns)
        k, row = mine(thread)
        bk, bi = first_b(thread)
        left, tap = int32(g.inner - state[CHANNEL]), int32(state[ACROSS] | state[DOWN])
        if SWEEP <= rows or row < rows:
            for r in range(sweeps):
                read, at = state[PIXELS + 2 * r] & tap == 0, state[PIXELS + 2 * r + 1] + state[MOVED]
                if by_rows:
                    to = int32(half_a + (row + SWEEP * r) * DEPTH + (k ^ row & VECTOR))
                    copy_16_if(sa, to, source, at, read and (whole or k < left))
                else:
                    to = int32(half_a + k * stride + row + SWEEP * r)
                    for q in range(SUCCESSIVE):
                        copy_if(sa, to + stride * q, source, at + q, read and (whole or k + q < left))
        b_step = int32(g.groups * g.inner) if b_along else g.weight_channel
        to = int32(half_b + bk * B_STRIDE + bi)
        fetch_weights(sb, to, weight, state[B_AT], b_step, bk, bi, int32(g.outer - column0), left)
        advance(state, g)

    @device
    def advance(state: ndarray, g: Pass) -> None:
        """Move on to the next channels, or to the first channels of the next tap."""
        add(state, CHANNEL, DEPTH)
        add(state, MOVED, DEPTH)
        add(state, B_AT, g.weight_next)
        if state[CHANNEL] >= g.inner:
            state[CHANNEL] = int32(0)
            state[ACROSS] = int32(state[ACROSS] << 1)
            add(state, MOVED, g.right)
            if not straight:
                add(state, B_AT, g.weight_right)
            if state[ACROSS] == state[END]:
                state[ACROSS], state[DOWN] = int32(1), int32(state[DOWN] << 1)
                add(state, MOVED, g.down)
                if not straight:
                    add(state, B_AT, g.weight_down)

    return Walk(stride, by_rows, PIXELS + 2 * sweeps, 0, start, fetch)
