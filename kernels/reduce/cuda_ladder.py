"""The steps of README.md for a GPU: sums over the rows of x (rows, C), in parts of 256 rows.

`python tests/cuda/facts.py reduce` prints the table. Each step writes its sums to partial (parts, C), in float64.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import float64, int32
from numpy import ndarray

from minidl.engine.cuda import cuda, kernel, launch
from minidl.engine.cuda_memory import get, put

from .block_sum import THREADS
from .cuda import _sum_columns
from .cuda_matrix import strips, wide

PART = 256  # rows


@kernel(threads=THREADS)
def _one_by_one(x: ndarray, parts: int, channels: int, partial: ndarray) -> None:
    number = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
    part, c = number % parts, number // parts
    if c < channels:
        total = float64(0)
        for r in range(part * PART, (part + 1) * PART):
            total += get(x, int32(r * channels + c))
        put(partial, int32(part * channels + c), total)


def naive(x: ndarray, partial: ndarray) -> None:
    """A thread for each part of a column. Neighbouring threads have neighbouring parts: they read distant numbers."""
    launch(_one_by_one, -(-partial.size // THREADS), x, *partial.shape, partial)


@kernel(threads=THREADS)
def _side_by_side(x: ndarray, parts: int, channels: int, partial: ndarray) -> None:
    number = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
    part, c = number // channels, number % channels
    if part < parts:
        total = float64(0)
        for r in range(part * PART, (part + 1) * PART):
            total += get(x, int32(r * channels + c))
        put(partial, int32(part * channels + c), total)


def coalesced(x: ndarray, partial: ndarray) -> None:
    """Neighbouring threads have neighbouring columns: a warp reads whole sectors."""
    launch(_side_by_side, -(-partial.size // THREADS), x, *partial.shape, partial)


def sixteen_bytes(x: ndarray, partial: ndarray) -> None:
    """Call cuda.py: 16 bytes per thread, and 64 threads for the rows of a part."""
    (rows, channels), parts, across = x.shape, partial.shape[0], strips(x.shape[1])
    launch(_sum_columns, parts * across, x, 1, rows, channels, parts, across, wide(channels, x), partial)


RUNGS: dict[str, Callable[[ndarray, ndarray], None]] = {
    "1 naive": naive,
    "2 coalesced": coalesced,
    "3 16 bytes per thread": sixteen_bytes,
}
