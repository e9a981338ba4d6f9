"""The steps of README.md for a GPU: out (M, N) = a (M, K) @ b (K, N) in float32.

README.md explains what each step changes. `python tests/cuda/facts.py matmul` prints the table.
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

SIDE = 16  # of a square of 256 threads
SQUARE = SIDE * SIDE


@device
def _dot(a: ndarray, b: ndarray, m: int, n: int, columns: int, depth: int) -> float:
    total = float32(0)
    for k in range(depth):
        total += get(a, int32(m * depth + k)) * get(b, int32(k * columns + n))
    return total


@kernel()
def _naive(a: ndarray, b: ndarray, out: ndarray, rows: int, columns: int, depth: int) -> None:
    m = int32(cuda.blockIdx.x * SIDE + cuda.threadIdx.x % SIDE)
    n = int32(cuda.blockIdx.y * SIDE + cuda.threadIdx.x // SIDE)
    if m < rows and n < columns:
        put(out, m * columns + n, _dot(a, b, m, n, columns, depth))


def naive(a: ndarray, b: ndarray, out: ndarray) -> None:
    """A thread for each m and n. Neighbouring threads have neighbouring m: each access touches 16 rows."""
    _launch(_naive, SIDE, SIDE, a, b, out)


@kernel()
def _coalesced(a: ndarray, b: ndarray, out: ndarray, rows: int, columns: int, depth: int) -> None:
    m = int32(cuda.blockIdx.x * SIDE + cuda.threadIdx.x // SIDE)
    n = int32(cuda.blockIdx.y * SIDE + cuda.threadIdx.x % SIDE)
    if m < rows and n < columns:
        put(out, m * columns + n, _dot(a, b, m, n, columns, depth))


def coalesced(a: ndarray, b: ndarray, out: ndarray) -> None:
    """Neighbouring threads have neighbouring n: a warp reads and writes neighbouring numbers."""
    _launch(_coalesced, SIDE, SIDE, a, b, out)


@device
def _element(matrix: ndarray, i: int, j: int, height: int, width: int) -> float:
    """Return matrix[i, j], or 0 outside the matrix."""
    return get(matrix, int32(i * width + j)) if i < height and j < width else float32(0)


@kernel()
def _shared_tiles(a: ndarray, b: ndarray, out: ndarray, rows: int, columns: int, depth: int) -> None:
    sa, sb = cuda.shared.array(SQUARE, float32), cuda.shared.array(SQUARE, float32)
    y, x = int32(cuda.threadIdx.x // SIDE), int32(cuda.threadIdx.x % SIDE)
    m, n = int32(cuda.blockIdx.x * SIDE + y), int32(cuda.blockIdx.y * SIDE + x)
    total = float32(0)
    for k0 in range(0, depth, SIDE):
        put(sa, y * SIDE + x, _element(a, m, k0 + x, rows, depth))
        put(sb, y * SIDE + x, _element(b, k0 + y, n, depth, columns))
        cuda.syncthreads()
        for k in range(SIDE):
            total += get(sa, y * SIDE + k) * get(sb, k * SIDE + x)
        cuda.syncthreads()
    if m < rows and n < columns:
        put(out, m * columns + n, total)


def shared_tiles(a: ndarray, b: ndarray, out: ndarray) -> None:
    """Copy a tile of a and of b to shared memory; each number is then used by 16 threads."""
    _launch(_shared_tiles, SIDE, SIDE, a, b, out)


ROWS, COLUMNS, DEPTH, HEIGHT = 64, 32, 8, 8  # the tile of `one_column`: a thread computes HEIGHT numbers of a column
A_SIZE, B_SIZE = ROWS * DEPTH, DEPTH * COLUMNS


@kernel()
def _one_column(a: ndarray, b: ndarray, out: ndarray, rows: int, columns: int, depth: int) -> None:
    sa, sb = cuda.shared.array(A_SIZE, float32), cuda.shared.array(B_SIZE, float32)
    sums = cuda.local.array(HEIGHT, float32)
    for i in range(HEIGHT):
        sums[i] = 0
    thread = int32(cuda.threadIdx.x)
    y, x = thread // COLUMNS, thread % COLUMNS
    row0, column0 = int32(cuda.blockIdx.x * ROWS), int32(cuda.blockIdx.y * COLUMNS)
    for k0 in range(0, depth, DEPTH):
        for i in range(2):
            at = thread + i * 256
            put(sa, at, _element(a, row0 + at // DEPTH, k0 + at % DEPTH, rows, depth))
        put(sb, thread, _element(b, k0 + y, column0 + x, depth, columns))
        cuda.syncthreads()
        for k in range(DEPTH):
            number = get(sb, k * COLUMNS + x)
            for i in range(HEIGHT):
                sums[i] += get(sa, (y * HEIGHT + i) * DEPTH + k) * number
        cuda.syncthreads()
    for i in range(HEIGHT):
        m, n = int32(row0 + y * HEIGHT + i), int32(column0 + x)
        if m < rows and n < columns:
            put(out, m * columns + n, sums[i])


def one_column(a: ndarray, b: ndarray, out: ndarray) -> None:
    """A thread computes 8 numbers of a column: each number of b that it loads is used 8 times."""
    _launch(_one_column, ROWS, COLUMNS, a, b, out)


WIDE, EIGHT = 128, 8  # the tile of the last steps: 128 x 128; a thread computes 8 x 8
SIZE = WIDE * DEPTH


@device
def _store(out: ndarray, sums: ndarray, m0: int, n0: int, rows: int, columns: int) -> None:
    for i in range(EIGHT):
        for j in range(EIGHT):
            if m0 + i < rows and n0 + j < columns:
                put(out, int32((m0 + i) * columns + n0 + j), sums[i, j])


@kernel(blocks_per_sm=2)
def _eight_by_eight(a: ndarray, b: ndarray, out: ndarray, rows: int, columns: int, depth: int) -> None:
    sa, sb = cuda.shared.array(SIZE, float32), cuda.shared.array(SIZE, float32)
    sums = cuda.local.array((EIGHT, EIGHT), float32)
    p, q = cuda.local.array(EIGHT, float32), cuda.local.array(EIGHT, float32)
    for i in range(EIGHT):
        for j in range(EIGHT):
            sums[i, j] = 0
    thread = int32(cuda.threadIdx.x)
    y, x = int32(thread // SIDE * EIGHT), int32(thread % SIDE * EIGHT)
    row0, column0 = int32(cuda.blockIdx.x * WIDE), int32(cuda.blockIdx.y * WIDE)
    for k0 in range(0, depth, DEPTH):
        for i in range(4):
            at = thread + i * 256
            put(sa, at, _element(a, row0 + at // DEPTH, k0 + at % DEPTH, rows, depth))
            put(sb, at, _element(b, k0 + at // WIDE, column0 + at % WIDE, depth, columns))
        cuda.syncthreads()
        for k in range(DEPTH):
            for i in range(EIGHT):
                p[i] = get(sa, (y + i) * DEPTH + k)
                q[i] = get(sb, k * WIDE + x + i)
            for i in range(EIGHT):
                for j in range(EIGHT):
                    sums[i, j] += p[i] * q[j]
        cuda.syncthreads()
    _store(out, sums, row0 + y, column0 + x, rows, columns)


def eight_by_eight(a: ndarray, b: ndarray, out: ndarray) -> None:
    """A thread computes 8 x 8 numbers: 16 loads for 64 multiply-adds."""
    _launch(_eight_by_eight, WIDE, WIDE, a, b, out)


@kernel(blocks_per_sm=2)
def _vector_loads(a: ndarray, b: ndarray, out: ndarray, rows: int, columns: int, depth: int) -> None:
    sa, sb = cuda.shared.array(SIZE, float32, 16), cuda.shared.array(SIZE, float32, 16)
    sums = cuda.local.array((EIGHT, EIGHT), float32)
    p, q = cuda.local.array(EIGHT, float32), cuda.local.array(EIGHT, float32)
    for i in range(EIGHT):
        for j in range(EIGHT):
            sums[i, j] = 0
    thread = int32(cuda.threadIdx.x)
    y, x = int32(thread // SIDE * EIGHT), int32(thread % SIDE * EIGHT)
    row0, column0 = int32(cuda.blockIdx.x * WIDE), int32(cuda.blockIdx.y * WIDE)
    for k0 in range(0, depth, DEPTH):
        for i in range(4):
            at = thread + i * 256
            put(sa, at % DEPTH * WIDE + at // DEPTH, _element(a, row0 + at // DEPTH, k0 + at % DEPTH, rows, depth))
            put(sb, at, _element(b, k0 + at // WIDE, column0 + at % WIDE, depth, columns))
        cuda.syncthreads()
        for k in range(DEPTH):
            p[0], p[1], p[2], p[3] = load4(sa, k * WIDE + y)
            p[4], p[5], p[6], p[7] = load4(sa, k * WIDE + y + 4)
            q[0], q[1], q[2], q[3] = load4(sb, k * WIDE + x)
            q[4], q[5], q[6], q[7] = load4(sb, k * WIDE + x + 4)
            for i in range(EIGHT):
                for j in range(EIGHT):
                    sums[i, j] += p[i] * q[j]
        cuda.syncthreads()
    _store(out, sums, row0 + y, column0 + x, rows, columns)


def vector_loads(a: ndarray, b: ndarray, out: ndarray) -> None:
    """a's tile is transposed in shared memory, so that 4 loads of 16 bytes replace 16 loads."""
    _launch(_vector_loads, WIDE, WIDE, a, b, out)


def copies_ahead(a: ndarray, b: ndarray, out: ndarray) -> None:
    """Call cuda.py: the next tile is copied in the background; a warp's threads lie in a Z curve."""
    nothing = np.empty(0, np.float32)
    fast.nn(a, b, nothing, False, nothing, nothing, out)


def _launch(compute: Any, tile_rows: int, tile_columns: int, a: ndarray, b: ndarray, out: ndarray) -> None:
    rows, columns = out.shape
    blocks = -(-rows // tile_rows), -(-columns // tile_columns)
    launch(compute, blocks, a, b, out, rows, columns, a.shape[1])


RUNGS: dict[str, Callable[[ndarray, ndarray, ndarray], None]] = {
    "1 naive": naive,
    "2 coalesced": coalesced,
    "3 shared tiles": shared_tiles,
    "4 a column of 8 per thread": one_column,
    "5 8 x 8 per thread": eight_by_eight,
    "6 loads of 16 bytes": vector_loads,
    "7 copies ahead": copies_ahead,
}
