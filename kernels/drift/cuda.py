"""The norms of a vector, of an earlier one and of their difference on a GPU: one pass, 8 bytes for each float32.

A thread loads four neighbouring elements of both vectors, and adds their squares as numbers of the arrays' type. Only
this sum becomes a float64. So in float32 a square has a relative error of at most 6 * 2^-24, and float64 arithmetic,
which is slow on many GPUs, is done for every fourth element only. The order of all additions is fixed.
"""

from __future__ import annotations

from numba import float64, int32
from numpy import ndarray

from minidl.engine.cuda import cuda, kernel, launch
from minidl.engine.cuda_memory import get, put

from ..elementwise.quads import QUAD, load, whole
from ..reduce.block_sum import THREADS, WARPS, add_blocks, block_sum
from .reference import __all__ as __all__

BLOCKS = THREADS  # the same number on each GPU, so that sums have the same order; `add_blocks` has a thread for each
LINE = 32  # elements: a block's part of the vectors begins on a cache line of float32
SUMS = 3  # for each segment: the squares of x - before, of before and of x


def drift_partial(segments: int) -> int:
    """Return how many float64 numbers `drift` needs: three sums per segment, for each block."""
    return BLOCKS * SUMS * segments


@kernel(threads=THREADS)
def _drift(
    x: ndarray, before: ndarray, starts: ndarray, stops: ndarray, each: int, whole: int, partial: ndarray
) -> None:
    """partial[block, s] = the three sums of segment s within the block's `each` elements"""
    sums = cuda.shared.array(WARPS, float64)
    v, w = cuda.local.array(QUAD, x.dtype), cuda.local.array(QUAD, x.dtype)
    n, segments, zero = int32(x.size), int32(starts.size), x.dtype.type(0)
    begin = int32(cuda.blockIdx.x) * each
    for s in range(segments):
        low, high = int32(max(get(starts, s), begin)), int32(min(get(stops, s), begin + each))
        moved, old, new = float64(0), float64(0), float64(0)
        if low < high:  # the same for all threads of the block
            for at in range(low // QUAD + int32(cuda.threadIdx.x), (high + QUAD - 1) // QUAD, THREADS):
                i = int32(at * QUAD)
                load(x, i, n, whole, v)
                load(before, i, n, whole, w)
                a, b, c = zero, zero, zero
                for j in range(QUAD):
                    if low <= i + j and i + j < high:
                        d = v[j] - w[j]
                        a += d * d
                        b += w[j] * w[j]
                        c += v[j] * v[j]
                moved += a
                old += b
                new += c
            moved, old, new = block_sum(moved, sums), block_sum(old, sums), block_sum(new, sums)
        if cuda.threadIdx.x == 0:
            at = (int32(cuda.blockIdx.x) * segments + s) * SUMS
            put(partial, at, moved)
            put(partial, at + 1, old)
            put(partial, at + 2, new)


def drift(x: ndarray, before: ndarray, starts: ndarray, stops: ndarray, partial: ndarray, squares: ndarray) -> None:
    numbers = SUMS * starts.size
    each = -(-x.size // (BLOCKS * LINE)) * LINE
    launch(_drift, BLOCKS, x, before, starts, stops, each, whole(x, before), partial)
    launch(add_blocks, numbers, partial, numbers, squares)
