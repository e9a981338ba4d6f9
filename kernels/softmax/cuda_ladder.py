"""The steps of README.md for a GPU: the softmax of the rows of x (rows, classes) in float32.

`python tests/cuda/facts.py softmax` prints the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import float32, float64, int32
from numpy import ndarray

from minidl.engine.cuda import Kernel, cuda, device, kernel, launch
from minidl.engine.cuda_memory import get, put

from ..reduce.block_sum import THREADS, WARP, warp_sum
from ..reduce.cuda_rows import warp_maximum
from . import cuda as fast


def _rows(threads: int, largest: Any, total: Any) -> Kernel:
    """Return the kernel with so many threads for each row. largest, total: over these threads"""

    def softmax(x: ndarray, rows: int, classes: int, y: ndarray) -> None:
        number = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        row, first = number // threads, number % threads
        if row < rows:
            begin, highest, result = int32(row * classes), float32(-math.inf), float64(0)
            for c in range(first, classes, threads):
                highest = max(highest, get(x, int32(begin + c)))
            highest = largest(highest)
            for c in range(first, classes, threads):
                result += math.exp(get(x, int32(begin + c)) - highest)
            inverse = float32(1 / total(result))
            for c in range(first, classes, threads):
                put(y, int32(begin + c), math.exp(get(x, int32(begin + c)) - highest) * inverse)

    return kernel(threads=THREADS)(softmax)


_itself = device(lambda value: value)
_thread_each, _warp_each = _rows(1, _itself, _itself), _rows(WARP, warp_maximum, warp_sum)


def naive(x: ndarray, y: ndarray) -> None:
    """A thread for each row. Neighbouring threads read numbers that are a row apart."""
    launch(_thread_each, -(-x.shape[0] // THREADS), x, *x.shape, y)


def coalesced(x: ndarray, y: ndarray) -> None:
    """A warp for each row. It reads the row three times: for the maximum, for the sum, and for y."""
    launch(_warp_each, -(-x.shape[0] * WARP // THREADS), x, *x.shape, y)


RUNGS: dict[str, Callable[[ndarray, ndarray], None]] = {
    "1 naive": naive,
    "2 coalesced": coalesced,
    "3 16 bytes, kept in shared memory": fast.softmax,
}
