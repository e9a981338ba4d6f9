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
from minidl.engine.cuda_memory import copy_if, load4, put, shifted

from ..matmul.cuda_loader import DEPTH, PADDING, SUCCESSIVE, Loader
from ..matmul.cuda_tile import Tile
from .cuda_geometry import Pass, quotient
from .cuda_pipeline import Walk
from .cuda_taps import LINE, NOWHERE, keep_row

CHUNK = 64  # tiles in the table
BITS = (CHUNK + 1) * DEPTH  # where the bits are in the table
LANES = DEPTH // SUCCESSIVE  # threads that copy one row
# Positions in `state`: in the table, k that are left, weight; then outside and pixel of each row
NEXT, LEFT, B_AT, PIXELS = 0, 1, 2, 3


def few(tile: Tile, b_loader: Loader) -> Walk:
    """Return the walk from k to k. b_loader: of the weights."""
    rows, columns, THREADS, SWEEP = tile.rows, tile.columns, tile.threads, tile.threads // LANES
    stride, sweeps = rows + PADDING, -(-rows // SWEEP)
    B_STRIDE, first_b, _, fetch_b = b_loader

    @device
    def start(state: ndarray, g: Pass, row0: int, column0: int, group: int) -> int:
        thread = int32(cuda.threadIdx.x)
        for r in range(sweeps):
            keep_row(state, PIXELS + 2 * r, int32(row0 + thread // LANES + SWEEP * r), int32(group * g.inner), g)
        bk, bi = first_b(thread)
        state[LEFT] = int32(g.taps_h * g.taps_w * g.inner)
        state[B_AT] = int32(bk * (g.groups * g.outer) + group * g.outer + column0 + bi)
        return int32((state[LEFT] + DEPTH - 1) // DEPTH)

    @device
    def fill(state: ndarray, table: ndarray, g: Pass, begin: int, count: int) -> None:
        depth, at = int32(g.taps_h * g.taps_w * g.inner), int32(cuda.threadIdx.x)
        while at < (count + 1) * DEPTH:
            k = int32(begin * DEPTH + at)
            tap = quotient(k, g.inner)
            u = quotient(tap, g.taps_w)
            v = int32(tap - u * g.taps_w)
            pixel = int32(u * g.spacing_h * g.source_w + v * g.spacing_w)
            put(table, at, int32(pixel * (g.groups * g.inner) + k - tap * g.inner))
            put(table, BITS + at, int32(1 << LINE + u | 1 << v) if k < depth else int32(NOWHERE))
            at = int32(at + THREADS)
        state[NEXT] = int32(cuda.threadIdx.x % LANES * SUCCESSIVE)
        if begin > 0:  # go back by the empty tile
            state[LEFT], state[B_AT] = int32(state[LEFT] + DEPTH), int32(state[B_AT] - DEPTH * (g.groups * g.outer))

    @device
    def fetch(
        sa: ndarray, sb: ndarray, half_a: int, half_b: int, state: ndarray, source: ndarray, weight: ndarray,
        table: ndarray, g: Pass,
    ) -> None:  # fmt: skip
        thread, column0 = int32(cuda.threadIdx.x), int32(cuda.blockIdx.y * columns)
        k, row = int32(thread % LANES * SUCCESSIVE), int32(thread // LANES)
        bk, bi = first_b(thread)
        if SWEEP <= rows or row < rows:
            o0, o1, o2, o3 = load4(table, state[NEXT])
            t0, t1, t2, t3 = load4(table, BITS + state[NEXT])
            to = shifted(sa, half_a + k * stride + row)
            for r in range(sweeps):
                outside, pixel = state[PIXELS + 2 * r], shifted(source, state[PIXELS + 2 * r + 1])
                copy_if(to, SWEEP * r, pixel, o0, outside & t0 == 0)
                copy_if(to, SWEEP * r + stride, pixel, o1, outside & t1 == 0)
                copy_if(to, SWEEP * r + 2 * stride, pixel, o2, outside & t2 == 0)
                copy_if(to, SWEEP * r + 3 * stride, pixel, o3, outside & t3 == 0)
        outputs = int32(g.groups * g.outer)
        to = half_b + bk * B_STRIDE + bi
        fetch_b(sb, to, weight, state[B_AT], outputs, bk, bi, int32(g.outer - column0), state[LEFT])
        state[NEXT], state[LEFT] = int32(state[NEXT] + DEPTH), int32(state[LEFT] - DEPTH)
        state[B_AT] = int32(state[B_AT] + DEPTH * outputs)

    return Walk(stride, B_STRIDE, False, PIXELS + 2 * sweeps, 2 * BITS, CHUNK, start, fill, fetch)
