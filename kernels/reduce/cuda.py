"""Reductions on a GPU. Sums are in float64, and their order depends only on the shapes.

A sum over rows (inner > 1) is computed in strips of columns (cuda_matrix.py). A sum of neighbours (inner = 1) has a
warp for each short row, and a block for each long one. Both write a sum for each chunk; `_total` adds these.
"""

from __future__ import annotations

from typing import Any

from numba import float64, int32, int64
from numpy import ndarray

from minidl.engine.cuda import cuda, device, kernel, launch
from minidl.engine.cuda_memory import get, load4, put

from ..elementwise.quads import QUAD, blocks, first, store, whole
from .block_sum import THREADS, WARP, WARPS, block_sum, warp_sum
from .cuda_matrix import (
    HEIGHT,
    PART_SUMS,
    STRIP,
    STRIP_SUMS,
    load_part,
    part_of,
    parts_sum,
    place,
    strip_sum,
    strips,
    wide,
)
from .cuda_rows import comes_first, row_first
from .reference import __all__ as __all__

SHORT = 1024  # numbers of a row that a warp sums


@kernel(threads=THREADS)
def _sum_columns(
    x: ndarray, outer: int, n: int, inner: int, chunks: int, strips: int, wide: bool, partial: ndarray
) -> None:
    """partial[chunk, o, strip] = sums over the chunk's rows: a block for each chunk, o and strip"""
    shared = cuda.shared.array(STRIP_SUMS, float64)
    block = int32(cuda.blockIdx.x)
    strip, o, chunk = block % strips, block // strips % outer, block // strips // outer
    begin, end = part_of(n, chunk, chunks)
    row, column = place()
    c = int32(strip * STRIP + column)
    v, sums = cuda.local.array(QUAD, x.dtype), cuda.local.array(QUAD, float64)
    for j in range(QUAD):
        sums[j] = 0
        v[j] = 0
    for r in range(begin + row, end, HEIGHT):
        load_part(x, int32((o * n + r) * inner + c), inner - c, wide, v)
        for j in range(QUAD):
            sums[j] += v[j]
    total = strip_sum(sums, shared)
    i = int32(strip * STRIP + cuda.threadIdx.x)
    if cuda.threadIdx.x < STRIP and i < inner:
        put(partial, int32((chunk * outer + o) * inner + i), total)


def _sum_neighbours(threads: int, total: Any) -> Any:
    """Return the kernel for inner = 1, with so many threads for each row. total: sums over these threads."""

    def sum_neighbours(x: ndarray, outer: int, n: int, chunks: int, whole: int, partial: ndarray) -> None:
        """partial[chunk, o] = the sum of a chunk of row o"""
        shared = cuda.shared.array(WARPS, float64)
        number = int32(cuda.blockIdx.x * (THREADS // threads) + cuda.threadIdx.x // threads)
        chunk, o = number // outer, number % outer
        begin, end = part_of(n, chunk, chunks)
        begin, end = int32(o * n + begin), int32(o * n + end)
        if chunk >= chunks:
            begin = end  # beyond the last row
        result = float64(0)
        for i in range(begin // QUAD * QUAD + cuda.threadIdx.x % threads * QUAD, end, threads * QUAD):
            if i >= begin and i + QUAD <= min(end, whole):
                a, b, c, d = load4(x, i)
                result += (float64(a) + float64(b)) + (float64(c) + float64(d))
            else:
                v = cuda.local.array(QUAD, float64)
                for j in range(QUAD):
                    v[j] = get(x, i + j) if i + j >= begin and i + j < end else 0
                result += (v[0] + v[1]) + (v[2] + v[3])
        result = total(result, shared)
        if cuda.threadIdx.x % threads == 0 and chunk < chunks:
            put(partial, number, result)

    return kernel(threads=THREADS)(sum_neighbours)


_sum_short = _sum_neighbours(WARP, device(lambda value, sums: warp_sum(value)))
_sum_long = _sum_neighbours(THREADS, block_sum)


@kernel(threads=THREADS)
def _total(partial: ndarray, chunks: int, out: ndarray) -> None:
    """out = the sum of partial over its chunks: a block for 32 sums"""
    sums = cuda.shared.array(PART_SUMS, float64)
    i = int32(cuda.blockIdx.x * WARP + cuda.threadIdx.x % WARP)
    total = parts_sum(partial, i, int32(out.size), chunks, sums)
    if cuda.threadIdx.x < WARP and i < out.size:
        put(out, i, out.dtype.type(total))


def sum(x: ndarray, partial: ndarray, out: ndarray) -> None:
    (outer, n, inner), chunks = x.shape, partial.shape[0]
    if inner > 1:
        across = strips(inner)
        arguments = outer, n, inner, chunks, across, wide(inner, x)
        launch(_sum_columns, chunks * outer * across, x, *arguments, partial)
    elif n <= SHORT * chunks:
        launch(_sum_short, -(-chunks * outer // WARPS), x, outer, n, chunks, whole(x), partial)
    else:
        launch(_sum_long, chunks * outer, x, outer, n, chunks, whole(x), partial)
    launch(_total, -(-out.size // WARP), partial, chunks, out)


@kernel(threads=THREADS)
def _maximum(x: ndarray, outer: int, n: int, inner: int, out: ndarray, winner: ndarray) -> None:
    """A thread for each maximum."""
    number = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
    if number < outer * inner:
        at = int32(number // inner * n * inner + number % inner)
        best, where = get(x, at), int32(0)
        for k in range(1, n):
            value = get(x, int32(at + k * inner))
            if comes_first(value, int32(k), best, where):
                best, where = value, int32(k)
        put(out, number, best)
        put(winner, number, int64(where))


@kernel(threads=THREADS)
def _maximum_of_neighbours(x: ndarray, outer: int, n: int, out: ndarray, winner: ndarray) -> None:
    """A warp for each maximum, which lies in a row of x (outer, n)."""
    o = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // WARP)
    if o < outer:
        best, where = row_first(x, int32(o * n), n)
        if cuda.threadIdx.x % WARP == 0:
            put(out, o, best)
            put(winner, o, int64(where))


def maximum(x: ndarray, out: ndarray, winner: ndarray) -> None:
    outer, n, inner = x.shape
    if inner == 1:
        launch(_maximum_of_neighbours, -(-outer // WARPS), x, outer, n, out, winner)
    else:
        launch(_maximum, -(-out.size // THREADS), x, outer, n, inner, out, winner)


@kernel(threads=THREADS)
def _maximum_backward(dy: ndarray, winner: ndarray, n: int, inner: int, dx: ndarray, whole: int) -> None:
    i, size = first(), int32(dx.size)
    v = cuda.local.array(QUAD, dx.dtype)
    for j in range(QUAD):
        v[j] = 0
        if i + j < size:
            row, column = int32(i + j) // inner, int32(i + j) % inner
            at = int32(row // n * inner + column)
            if get(winner, at) == row % n:
                v[j] = get(dy, at)
    store(dx, i, size, whole, v)


def maximum_backward(dy: ndarray, winner: ndarray, dx: ndarray) -> None:
    launch(_maximum_backward, blocks(dx.size), dy, winner, *dx.shape[1:], dx, whole(dx))
