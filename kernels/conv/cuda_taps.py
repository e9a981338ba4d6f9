"""Copies tiles of a convolution to shared memory: eight channels of the source's pixels, for one tap after the other.

A tile's rows are pixels of out. Two threads copy the eight numbers of a row, four each, so the tile is transposed on
its way, as by `along` in matmul/cuda_loader.py. A thread keeps its rows for all tiles. For each row it knows

    h, w    the pixel of the source that the row reads at the current tap
    at      where the thread's numbers of this pixel begin

The next tap is `spacing` pixels to the right, or at the beginning of the next line of taps. So a tile needs no
divisions: two comparisons (is the pixel in the image?) and the copies. Beyond the image the copies write 0.
If a group has C channels and 8 does not divide C, the last tile of each tap contains zeros.
"""

from __future__ import annotations

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import cuda, device
from minidl.engine.cuda_memory import copy_if

from ..matmul.cuda_loader import DEPTH, PADDING, SUCCESSIVE, Loader
from ..matmul.cuda_tile import Tile
from .cuda_geometry import Pass, inside, split
from .cuda_pipeline import Walk

LANES = DEPTH // SUCCESSIVE  # threads that copy one row
FAR = -(1 << 29)  # h of a row that is no pixel of this pass: it is never in the image
CHANNEL, COLUMN, B_AT, PIXELS = 0, 1, 2, 3  # positions in `state`: channel, column of taps, weight, then h, w, at each


def sweep_of(tile: Tile) -> int:
    """Return how many rows all threads copy at once."""
    return tile.threads // LANES


@device
def add(state: ndarray, position: int, number: int) -> None:
    state[position] = int32(state[position] + number)


def taps(tile: Tile, whole: bool, b_along: bool, b_loader: Loader) -> Walk:
    """Return the walk from tap to tap. whole: DEPTH divides the number of channels of a group.

    b_along: the weights of successive k are neighbours. b_loader: of the weights.
    """
    rows, columns, SWEEP = tile.rows, tile.columns, sweep_of(tile)
    stride, sweeps = rows + PADDING, -(-rows // SWEEP)
    B_STRIDE, first_b, fetch_b, fetch_part_b = b_loader
    fetch_weights = fetch_b if whole else fetch_part_b

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
            state[PIXELS + 3 * r] = h if n < g.images else int32(FAR)
            state[PIXELS + 3 * r + 1] = w
            state[PIXELS + 3 * r + 2] = int32(((n * g.source_h + h) * g.source_w + w) * channels + group * g.inner + k)
        bk, bi = first_b(thread)
        if b_along:
            at = int32(g.weight + (column0 + bi) * channels + group * g.inner + bk)
        else:
            at = int32(g.weight + bk * g.weight_channel + group * g.outer + column0 + bi)
        state[CHANNEL], state[COLUMN], state[B_AT] = int32(0), int32(0), at
        return int32(g.taps_h * g.taps_w * ((g.inner + DEPTH - 1) // DEPTH))

    @device
    def fetch(
        sa: ndarray, sb: ndarray, half_a: int, half_b: int, state: ndarray, source: ndarray, weight: ndarray,
        table: ndarray, g: Pass,
    ) -> None:  # fmt: skip
        thread, column0 = int32(cuda.threadIdx.x), int32(cuda.blockIdx.y * columns)
        k, row = mine(thread)
        bk, bi = first_b(thread)
        left = int32(g.inner - state[CHANNEL])
        if SWEEP <= rows or row < rows:
            for r in range(sweeps):
                h, w, at = state[PIXELS + 3 * r], state[PIXELS + 3 * r + 1], state[PIXELS + 3 * r + 2]
                read = inside(h, w, g.source_h, g.source_w)
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
        add(state, B_AT, g.weight_next)
        for r in range(sweeps):
            add(state, PIXELS + 3 * r + 2, DEPTH)
        if state[CHANNEL] >= g.inner:
            state[CHANNEL] = int32(0)
            add(state, COLUMN, 1)
            add(state, B_AT, g.weight_right)
            for r in range(sweeps):
                add(state, PIXELS + 3 * r + 1, g.spacing_w)
                add(state, PIXELS + 3 * r + 2, g.right)
            if state[COLUMN] == g.taps_w:
                state[COLUMN] = int32(0)
                add(state, B_AT, g.weight_down)
                for r in range(sweeps):
                    add(state, PIXELS + 3 * r, g.spacing_h)
                    add(state, PIXELS + 3 * r + 1, -g.taps_w * g.spacing_w)
                    add(state, PIXELS + 3 * r + 2, g.down)

    return Walk(stride, PIXELS + 3 * sweeps, 0, start, fetch)
