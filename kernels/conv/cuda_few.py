"""Copies tiles of a convolution with few channels to shared memory, such as the 1 or 3 of an image.

cuda_taps.py fills each tap's last tile with zeros: with 3 channels, 5 of 8 products would be wasted. Here, the k of all
taps follow one another without gaps, so a tile may contain several taps. A table in shared memory tells for each k

    the distance from the pixel of tap 0 to the number, in elements
    the distance from the pixel of tap 0 to the pixel: lines * 65536 + columns

Two small numbers in one integer save half of the additions. If p = h * 65536 + w is a pixel, and `last` is the image's
last one, then the pixel is in the image if no half of p and of last - p is negative: one test of two sign bits.
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
from .cuda_taps import LANES, sweep_of

LONGEST = 512  # k in the table
LARGEST = 1 << 14  # pixels of an image's side, with its padding and the window
NO_ROW = -(1 << 31)  # h of a row that is no pixel of out: negative, also after any tap is added
NO_TAP = LARGEST  # columns to the right: beyond each image
SIGNS = -(1 << 31) + (1 << 15)  # the sign bits of both halves
DONE, B_AT, PIXELS = 0, 1, 2  # positions in `state`: k that are copied, weight, then p and the element for each row


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
            lines, right = int32(u * g.spacing_h), int32((tap - u * g.taps_w) * g.spacing_w)
            put(table, k, int32((lines * g.source_w + right) * channels + k - tap * g.inner))
            put(table, LONGEST + k, int32((lines << 16) + right) if k < depth else int32(NO_TAP))
            k = int32(k + THREADS)
        for r in range(sweeps):
            n, i, j = split(int32(row0 + thread // LANES + SWEEP * r), g.pixels_h, g.pixels_w)
            h, w = int32(g.offset_h + i * g.step_h), int32(g.offset_w + j * g.step_w)
            state[PIXELS + 2 * r] = int32((h << 16) + w) if n < g.images else int32(NO_ROW)
            state[PIXELS + 2 * r + 1] = int32(((n * g.source_h + h) * g.source_w + w) * channels + group * g.inner)
        bk, bi = first_b(thread)
        state[DONE] = int32(0)
        state[B_AT] = int32(bk * (g.groups * g.outer) + group * g.outer + column0 + bi)
        cuda.syncthreads()  # the table is complete
        return tiles

    @device
    def copy_one(sa: ndarray, to: int, source: ndarray, at: int, pixel: int, last: int) -> None:
        copy_if(sa, to, source, at, int32(pixel | int32(last - pixel)) & int32(SIGNS) == 0)

    @device
    def fetch(
        sa: ndarray, sb: ndarray, half_a: int, half_b: int, state: ndarray, source: ndarray, weight: ndarray,
        table: ndarray, g: Pass,
    ) -> None:  # fmt: skip
        thread, column0 = int32(cuda.threadIdx.x), int32(cuda.blockIdx.y * columns)
        k, row = int32(thread % LANES * SUCCESSIVE), int32(thread // LANES)
        bk, bi = first_b(thread)
        last = int32(((g.source_h - 1) << 16) + g.source_w - 1)
        if SWEEP <= rows or row < rows:
            o0, o1, o2, o3 = load4(table, state[DONE] + k)
            t0, t1, t2, t3 = load4(table, LONGEST + state[DONE] + k)
            for r in range(sweeps):
                p, at = state[PIXELS + 2 * r], state[PIXELS + 2 * r + 1]
                to = int32(half_a + k * stride + row + SWEEP * r)
                copy_one(sa, to, source, int32(at + o0), int32(p + t0), last)
                copy_one(sa, to + stride, source, int32(at + o1), int32(p + t1), last)
                copy_one(sa, to + 2 * stride, source, int32(at + o2), int32(p + t2), last)
                copy_one(sa, to + 3 * stride, source, int32(at + o3), int32(p + t3), last)
        outputs, left = int32(g.groups * g.outer), int32(g.taps_h * g.taps_w * g.inner - state[DONE])
        to = int32(half_b + bk * B_STRIDE + bi)
        fetch_b(sb, to, weight, state[B_AT], outputs, bk, bi, int32(g.outer - column0), left)
        state[DONE], state[B_AT] = int32(state[DONE] + DEPTH), int32(state[B_AT] + DEPTH * outputs)

    return Walk(stride, PIXELS + 2 * sweeps, 2 * LONGEST, start, fetch)
