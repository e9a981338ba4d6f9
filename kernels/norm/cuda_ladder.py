"""The steps of README.md for a GPU: batch norm of x (rows, C) in float32, without relu.

`python tests/cuda/facts.py norm` prints the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import float32, float64, int32
from numpy import ndarray

from minidl.engine.cuda import Kernel, cuda, device, kernel, launch
from minidl.engine.cuda_memory import get, put

from ..reduce.block_sum import THREADS, WARP, WARPS, block_sum
from . import cuda as fast

EPS = 1e-5


@device
def _column_sum(value: float, sums: ndarray) -> float:
    """Return the sum over the threads with the same lane. sums: shared memory for a number of each thread."""
    thread = int32(cuda.threadIdx.x)
    cuda.syncthreads()  # the previous sums have been read
    sums[thread] = value
    cuda.syncthreads()
    total = sums[thread % WARP]
    for warp in range(1, WARPS):
        total += sums[warp * WARP + thread % WARP]
    return total


def _channels(width: int, total: Any) -> Kernel:
    """Return the kernel for blocks of `width` neighbouring channels. total: over the threads of a channel"""
    height = THREADS // width

    def batch_norm(x: ndarray, weight: ndarray, bias: ndarray, rows: int, channels: int, y: ndarray) -> None:
        sums = cuda.shared.array(THREADS, float64)
        thread = int32(cuda.threadIdx.x)
        row, c = thread // width, int32(cuda.blockIdx.x * width + thread % width)
        first, second, origin = float64(0), float64(0), float64(0)
        if c < channels:
            origin = float64(get(x, c))
            for r in range(row, rows, height):
                distance = float64(get(x, int32(r * channels + c))) - origin
                first += distance
                second += distance * distance
        distance, square = total(first, sums) / rows, total(second, sums) / rows
        if c < channels:
            mean, variance = float32(origin + distance), max(square - distance * distance, 0.0)
            scale, shift = float32(1 / math.sqrt(variance + EPS)) * get(weight, c), get(bias, c)
            for r in range(row, rows, height):
                at = int32(r * channels + c)
                put(y, at, (get(x, at) - mean) * scale + shift)

    return kernel(threads=THREADS)(batch_norm)


_one_channel, _neighbours = _channels(1, block_sum), _channels(WARP, _column_sum)


def naive(x: ndarray, weight: ndarray, bias: ndarray, y: ndarray) -> None:
    """A block for each channel. Neighbouring threads read numbers that are C apart."""
    launch(_one_channel, x.shape[1], x, weight, bias, *x.shape, y)


def coalesced(x: ndarray, weight: ndarray, bias: ndarray, y: ndarray) -> None:
    """A block for 32 channels. A warp reads 32 neighbouring numbers of a row."""
    launch(_neighbours, -(-x.shape[1] // WARP), x, weight, bias, *x.shape, y)


def sixteen_bytes(x: ndarray, weight: ndarray, bias: ndarray, y: ndarray) -> None:
    """Call cuda.py: 16 bytes per thread, and many blocks for the same channels."""
    mean, rstd, running_mean, running_var = np.zeros((4, x.shape[1]), np.float32)
    partial = np.zeros((max(1, x.shape[0] // 256), 2, x.shape[1]))
    fast.batch_norm(x, weight, bias, EPS, 0.1, x[:0], False, running_mean, running_var, partial, mean, rstd, y)


RUNGS: dict[str, Callable[[ndarray, ndarray, ndarray, ndarray], None]] = {
    "1 naive": naive,
    "2 coalesced": coalesced,
    "3 16 bytes": sixteen_bytes,
}
