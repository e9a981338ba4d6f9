"""Sums over the threads of a CUDA block, in a fixed order: shuffles within each warp, then shared memory."""

from __future__ import annotations

from typing import Any

from numba import float64, int32
from numpy import ndarray

from minidl.engine.cuda import cuda, device, kernel
from minidl.engine.cuda_memory import get, put

WARP = 32
ALL = 0xFFFFFFFF  # all threads of a warp take part
THREADS = 256  # of a block that calls `block_sum`
WARPS = THREADS // WARP


@device
def warp_sum(value: Any) -> Any:
    """Return the sum over the warp, to each of its threads."""
    value += cuda.shfl_xor_sync(ALL, value, 16)
    value += cuda.shfl_xor_sync(ALL, value, 8)
    value += cuda.shfl_xor_sync(ALL, value, 4)
    value += cuda.shfl_xor_sync(ALL, value, 2)
    value += cuda.shfl_xor_sync(ALL, value, 1)
    return value


@device
def block_sum(value: Any, sums: ndarray) -> Any:
    """Return the sum over the block, to each of its threads. sums: shared memory for WARPS numbers."""
    value = warp_sum(value)
    cuda.syncthreads()  # the previous sum has been read
    if cuda.threadIdx.x % WARP == 0:
        sums[cuda.threadIdx.x // WARP] = value
    cuda.syncthreads()
    total = sums[0]
    for warp in range(1, WARPS):
        total += sums[warp]
    return total


@kernel(threads=THREADS)
def add_blocks(partial: ndarray, numbers: int, out: ndarray) -> None:
    """out[i] = sum of partial[:, i], partial (THREADS, numbers), all float64: a block for each number"""
    sums = cuda.shared.array(WARPS, float64)
    i = int32(cuda.blockIdx.x)
    total = block_sum(get(partial, int32(cuda.threadIdx.x) * numbers + i), sums)
    if cuda.threadIdx.x == 0:
        put(out, i, total)
