"""Copies tiles of a convolution with few channels to shared memory, such as the 1 or 3 of an image.

cuda_taps.py fills each tap's last tile with zeros: with 3 channels, 5 of 8 products would be wasted. Here, the k of all
taps follow one another without gaps, so a tile may contain several taps. A table in shared memory tells for each k

    the distance from the pixel of tap 0 to the number, in elements
    the bits of its column and line of taps, as in cuda_taps.py
"""

from __future__ import annotations

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import cuda, device
from minidl.engine.cuda_memory import copy_if, load4, put

from ..matmul.cuda_loader import DEPTH, PADDING, SUCCESSIVE, Loader
from ..matmul.cuda_tile import Tile
from .cuda_geometry import Pass, quotient, split
from .cuda_pipeline import Walk
from .cuda_taps import LANES, LINE, NOWHERE, bits_outside, sweep_of

LONGEST = 512  # k in the table
DONE, B_AT, PIXELS = 0, 1, 2  # positions in `state`: k that are copied, weight, then outside and at for each row


def few(tile: Tile, b_loader: Loader) -> Walk:
    """Return the walk from k to k. b_loader: of the weights."""
    rows, columns, THREADS, SWEEP = tile.rows, tile.columns, tile.threads, sweep_of(tile)
    stride, sweeps = rows + PADDING, -(-rows // SWEEP)
    B_STRIDE, first_b, _, fetch_b = b_loader

    @device
    def start(state: ndarray, table: ndarray, g: Pass, row0: int, column0: int, group: int) -> int:
        thread, channels = int32(cuda.threadIdx.x), int32(g.groups * g.inner)
        depth = int32(g.taps_h * g.taps_w * g.inner)
        tiles = int32((depth + DEPTH - 1) // DEPTH)
        k = thread
        while k < tiles * DEPTH:
            tap = quotient(k, g.inner)
            u = quotient(tap, g.taps_w)
            v = int32(tap - u * g.taps_w)
            put(table, k, int32((u * g.spacing_h * g.source_w + v * g.spacing_w) * channels + k - tap * g.inner))
            put(table, LONGEST + k, int32(1 << LINE + u | 1 << v) if k < depth else int32(NOWHERE))
            k = int32(k + THREADS)
        for r in range(sweeps):
            n, i, j = split(int32(row0 + thread // LANES + SWEEP * r), g.pixels_h, g.pixels_w)
            h, w = int32(g.offset_h + i * g.step_h), int32(g.offset_w + j * g.step_w)
            state[PIXELS + 2 * r] = bits_outside(h, w, g) if n < g.images else int32(-1)
            state[PIXELS + 2 * r + 1] = int32(((n * g.source_h + h) * g.source_w + w) * channels + group * g.inner)
        bk, bi = first_b(thread)
        state[DONE] = int32(0)
        state[B_AT] = int32(bk * (g.groups * g.outer) + group * g.outer + column0 + bi)
        cuda.syncthreads()  # the table is complete
        return tiles

    @device
    def fetch(
        sa: ndarray, sb: ndarray, half_a: int, half_b: int, state: ndarray, source: ndarray, weight: ndarray,
        table: ndarray, g: Pass,
    ) -> None:  # fmt: skip
        thread, column0 = int32(cuda.threadIdx.x), int32(cuda.blockIdx.y * columns)
        k, row = int32(thread % LANES * SUCCESSIVE), int32(thread // LANES)
        bk, bi = first_b(thread)
        if SWEEP <= rows or row < rows:
            o0, o1, o2, o3 = load4(table, state[DONE] + k)
            t0, t1, t2, t3 = load4(table, LONGEST + state[DONE] + k)
            for r in range(sweeps):
                outside, at = state[PIXELS + 2 * r], state[PIXELS + 2 * r + 1]
                to = int32(half_a + k * stride + row + SWEEP * r)
                copy_if(sa, to, source, int32(at + o0), outside & t0 == 0)
                copy_if(sa, to + stride, source, int32(at + o1), outside & t1 == 0)
                copy_if(sa, to + 2 * stride, source, int32(at + o2), outside & t2 == 0)
                copy_if(sa, to + 3 * stride, source, int32(at + o3), outside & t3 == 0)
        outputs, left = int32(g.groups * g.outer), int32(g.taps_h * g.taps_w * g.inner - state[DONE])
        to = int32(half_b + bk * B_STRIDE + bi)
        fetch_b(sb, to, weight, state[B_AT], outputs, bk, bi, int32(g.outer - column0), left)
        state[DONE], state[B_AT] = int32(state[DONE] + DEPTH), int32(state[B_AT] + DEPTH * outputs)

    return Walk(stride, False, PIXELS + 2 * sweeps, 2 * LONGEST, start, fetch)
