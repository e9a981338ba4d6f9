"""The steps of README.md for a GPU: the squares of |x - before|, |before| and |x| for vectors of float32.

`python tests/cuda/facts.py drift` prints the table. In all steps, 256 blocks sum equal parts of the vectors.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import float64, int32
from numpy import ndarray

from minidl.engine.cuda import Kernel, cuda, kernel, launch
from minidl.engine.cuda_memory import get, put

from ..reduce.block_sum import THREADS, WARPS, add_blocks, block_sum
from . import cuda as fast
from .cuda import BLOCKS, SUMS


def _sums(side_by_side: bool) -> Kernel:
    """Return the kernel in which neighbouring threads read neighbours, or in which each thread reads a run of them."""

    def sums(x: ndarray, before: ndarray, each: int, partial: ndarray) -> None:
        """partial[block] = the three sums of the block's `each` elements"""
        shared = cuda.shared.array(WARPS, float64)
        begin, thread = int32(int32(cuda.blockIdx.x) * each), int32(cuda.threadIdx.x)
        end = int32(min(begin + each, x.size))
        moved, old, new = float64(0), float64(0), float64(0)
        if side_by_side:
            first, last, step = int32(begin + thread), end, THREADS
        else:
            run = int32((each + THREADS - 1) // THREADS)
            first, last, step = int32(begin + thread * run), int32(min(begin + (thread + 1) * run, end)), 1
        for i in range(first, last, step):
            v, w = float64(get(x, i)), float64(get(before, i))
            moved += (v - w) * (v - w)
            old += w * w
            new += v * v
        moved, old, new = block_sum(moved, shared), block_sum(old, shared), block_sum(new, shared)
        if thread == 0:
            put(partial, int32(cuda.blockIdx.x * SUMS), moved)
            put(partial, int32(cuda.blockIdx.x * SUMS + 1), old)
            put(partial, int32(cuda.blockIdx.x * SUMS + 2), new)

    return kernel(threads=THREADS)(sums)


_runs, _side_by_side = _sums(False), _sums(True)


def naive(x: ndarray, before: ndarray, partial: ndarray, squares: ndarray) -> None:
    """A thread sums a run of neighbours, in float64."""
    _launch(_runs, x, before, partial, squares)


def coalesced(x: ndarray, before: ndarray, partial: ndarray, squares: ndarray) -> None:
    """A thread sums every 256th element of the block, in float64."""
    _launch(_side_by_side, x, before, partial, squares)


def sixteen_bytes(x: ndarray, before: ndarray, partial: ndarray, squares: ndarray) -> None:
    """Call cuda.py with one segment. A thread adds four squares in float32, and then their sum in float64."""
    fast.drift(x, before, np.array([0]), np.array([x.size]), partial, squares)


def _launch(compute: Kernel, x: ndarray, before: ndarray, partial: ndarray, squares: ndarray) -> None:
    launch(compute, BLOCKS, x, before, -(-x.size // BLOCKS), partial)
    launch(add_blocks, SUMS, partial, SUMS, squares)


RUNGS: dict[str, Callable[..., None]] = {"1 naive": naive, "2 coalesced": coalesced, "3 16 bytes": sixteen_bytes}
