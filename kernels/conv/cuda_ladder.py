"""The steps of README.md for a GPU: y (N, H, W, O) for a 3 x 3 kernel with padding 1 and stride 1, in float32.

README.md explains what each step changes. `python tests/cuda/facts.py conv` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import float32, int32
from numpy import ndarray

from minidl.engine.cuda import cuda, device, kernel, launch
from minidl.engine.cuda_memory import get, load4, put

from . import cuda as fast
from .cuda_geometry import inside, quotient, split

SIDE, TILE, DEPTH, EIGHT = 16, 128, 8, 8
SQUARE, SIZE = SIDE * SIDE, TILE * DEPTH
ONE = (1, 1)


@device
def _number(x: ndarray, n: int, h: int, w: int, c: int, height: int, width: int, channels: int) -> float:
    """Return x[n, h, w, c], or 0 outside the image."""
    return get(x, int32(((n * height + h) * width + w) * channels + c)) if inside(h, w, height, width) else float32(0)


@device
def _sum(x: ndarray, weight: ndarray, m: int, o: int, height: int, width: int, channels: int, outputs: int) -> float:
    n, i, j = split(m, height, width)
    total = float32(0)
    for u in range(3):
        for v in range(3):
            for c in range(channels):
                number = _number(x, n, int32(i + u - 1), int32(j + v - 1), c, height, width, channels)
                total += number * get(weight, int32(((u * 3 + v) * channels + c) * outputs + o))
    return total


@kernel()
def _naive(
    x: ndarray, weight: ndarray, y: ndarray, pixels: int, height: int, width: int, channels: int, outputs: int
) -> None:
    m = int32(cuda.blockIdx.x * SIDE + cuda.threadIdx.x % SIDE)
    o = int32(cuda.blockIdx.y * SIDE + cuda.threadIdx.x // SIDE)
    if m < pixels and o < outputs:
        put(y, m * outputs + o, _sum(x, weight, m, o, height, width, channels, outputs))


def naive(x: ndarray, weight: ndarray, y: ndarray) -> None:
    """A thread for each output. Neighbouring threads have neighbouring pixels: each access touches 16 pixels."""
    _launch(_naive, SIDE, x, weight, y)


@kernel()
def _coalesced(
    x: ndarray, weight: ndarray, y: ndarray, pixels: int, height: int, width: int, channels: int, outputs: int
) -> None:
    m = int32(cuda.blockIdx.x * SIDE + cuda.threadIdx.x // SIDE)
    o = int32(cuda.blockIdx.y * SIDE + cuda.threadIdx.x % SIDE)
    if m < pixels and o < outputs:
        put(y, m * outputs + o, _sum(x, weight, m, o, height, width, channels, outputs))


def coalesced(x: ndarray, weight: ndarray, y: ndarray) -> None:
    """Neighbouring threads have neighbouring output channels: a warp reads and writes neighbouring numbers."""
    _launch(_coalesced, SIDE, x, weight, y)


@device
def _patch(x: ndarray, m: int, k: int, pixels: int, height: int, width: int, channels: int) -> float:
    """Return element (m, k) of the patches: four divisions for each number."""
    n, i, j = split(m, height, width)
    tap = quotient(k, channels)
    u = quotient(tap, 3)
    h, w, c = int32(i + u - 1), int32(j + tap - u * 3 - 1), int32(k - tap * channels)
    return _number(x, n, h, w, c, height, width, channels) if m < pixels and u < 3 else float32(0)


@kernel(blocks_per_sm=2)
def _divisions(
    x: ndarray, weight: ndarray, y: ndarray, pixels: int, height: int, width: int, channels: int, outputs: int
) -> None:
    sa, sb = cuda.shared.array(SIZE, float32, 16), cuda.shared.array(SIZE, float32, 16)
    sums = cuda.local.array((EIGHT, EIGHT), float32)
    p, q = cuda.local.array(EIGHT, float32), cuda.local.array(EIGHT, float32)
    for i in range(EIGHT):
        for j in range(EIGHT):
            sums[i, j] = 0
    thread = int32(cuda.threadIdx.x)
    a, b = int32(thread // SIDE * EIGHT), int32(thread % SIDE * EIGHT)
    row0, column0, depth = int32(cuda.blockIdx.x * TILE), int32(cuda.blockIdx.y * TILE), int32(9 * channels)
    for k0 in range(0, depth, DEPTH):
        for i in range(4):
            at = int32(thread + i * 256)
            row, o = int32(row0 + at // DEPTH), int32(column0 + at % TILE)
            put(sa, at % DEPTH * TILE + at // DEPTH,
                _patch(x, row, int32(k0 + at % DEPTH), pixels, height, width, channels))  # fmt: skip
            k = int32(k0 + at // TILE)
            put(sb, at, get(weight, int32(k * outputs + o)) if k < depth and o < outputs else float32(0))
        cuda.syncthreads()
        for k in range(DEPTH):
            p[0], p[1], p[2], p[3] = load4(sa, k * TILE + a)
            p[4], p[5], p[6], p[7] = load4(sa, k * TILE + a + 4)
            q[0], q[1], q[2], q[3] = load4(sb, k * TILE + b)
            q[4], q[5], q[6], q[7] = load4(sb, k * TILE + b + 4)
            for i in range(EIGHT):
                for j in range(EIGHT):
                    sums[i, j] += p[i] * q[j]
        cuda.syncthreads()
    for i in range(EIGHT):
        for j in range(EIGHT):
            if row0 + a + i < pixels and column0 + b + j < outputs:
                put(y, (row0 + a + i) * outputs + column0 + b + j, sums[i, j])


def divisions(x: ndarray, weight: ndarray, y: ndarray) -> None:
    """A product of patches and weights, in tiles. Each copied number of x is found by dividing its row and its k."""
    _launch(_divisions, TILE, x, weight, y)


def kept_pixels(x: ndarray, weight: ndarray, y: ndarray) -> None:
    """Call cuda.py: a thread keeps its pixels, and reads the taps from a table; copies are in the background."""
    none = np.empty(0, np.float32)
    fast.forward(x, weight, none, none, none, none, False, 1, ONE, ONE, ONE, False, none, none, y)


def _launch(compute: Any, tile: int, x: ndarray, weight: ndarray, y: ndarray) -> None:
    images, height, width, channels = x.shape
    pixels, outputs = images * height * width, y.shape[3]
    launch(
        compute, (-(-pixels // tile), -(-outputs // tile)), x, weight, y, pixels, height, width, channels, outputs
    )


RUNGS: dict[str, Callable[[ndarray, ndarray, ndarray], None]] = {
    "1 naive": naive,
    "2 coalesced": coalesced,
    "3 tiles, divisions": divisions,
    "4 pixels are kept": kept_pixels,
}
