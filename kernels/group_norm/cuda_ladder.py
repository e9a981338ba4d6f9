"""The steps of README.md for a GPU: group norm of x (N, pixels, C) in float32, without relu.

`python tests/cuda/facts.py group_norm` prints the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import float32, float64, int32
from numpy import ndarray

from minidl.engine.cuda import Kernel, cuda, device, kernel, launch
from minidl.engine.cuda_memory import get, put

from ..reduce.block_sum import THREADS, WARPS, block_sum
from . import cuda as fast

EPS = 1e-5


def _groups(threads: int, total: Any) -> Kernel:
    """Return the kernel with so many threads for each group of an image. total: sums over these threads"""

    def group_norm(
        x: ndarray, weight: ndarray, bias: ndarray, pixels: int, channels: int, size: int, mean: ndarray,
        rstd: ndarray, y: ndarray,
    ) -> None:  # fmt: skip
        shared = cuda.shared.array(WARPS, float64)
        number = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        group, thread, groups = number // threads, number % threads, channels // size
        if group < mean.size:  # the same for all threads that add their sums
            begin = int32(group // groups * pixels * channels + group % groups * size)
            origin, first, second = float64(get(x, begin)), float64(0), float64(0)
            for i in range(thread, pixels * size, threads):
                distance = float64(get(x, int32(begin + i // size * channels + i % size))) - origin
                first += distance
                second += distance * distance
            distance = total(first, shared) / (pixels * size)
            variance = max(total(second, shared) / (pixels * size) - distance * distance, 0.0)
            m, s = float32(origin + distance), float32(1 / math.sqrt(variance + EPS))
            if thread == 0:
                put(mean, group, m)
                put(rstd, group, s)
            for i in range(thread, pixels * size, threads):
                c = int32(group % groups * size + i % size)
                at = int32(begin + i // size * channels + i % size)
                put(y, at, (get(x, at) - m) * (s * get(weight, c)) + get(bias, c))

    return kernel(threads=THREADS)(group_norm)


_thread_each, _block_each = _groups(1, device(lambda value, shared: value)), _groups(THREADS, block_sum)


def thread_each(x: ndarray, weight: ndarray, bias: ndarray, mean: ndarray, rstd: ndarray, y: ndarray) -> None:
    """A thread for each group of an image. Neighbouring threads read numbers that are a group apart."""
    _launch(_thread_each, 1, x, weight, bias, mean, rstd, y)


def block_each(x: ndarray, weight: ndarray, bias: ndarray, mean: ndarray, rstd: ndarray, y: ndarray) -> None:
    """A block for each group. Neighbouring threads read neighbouring channels, but a group has only a few."""
    _launch(_block_each, THREADS, x, weight, bias, mean, rstd, y)


def _launch(
    compute: Kernel, threads: int, x: ndarray, weight: ndarray, bias: ndarray, mean: ndarray, rstd: ndarray, y: ndarray
) -> None:
    _, pixels, channels = x.shape
    size = channels // mean.shape[1]
    launch(compute, -(-mean.size * threads // THREADS), x, weight, bias, pixels, channels, size, mean, rstd, y)


def sixteen_bytes(x: ndarray, weight: ndarray, bias: ndarray, mean: ndarray, rstd: ndarray, y: ndarray) -> None:
    """Call cuda.py: a block for 16 neighbouring channels, which may be several groups."""
    fast.group_norm(x, weight, bias, EPS, x[:0], False, mean, rstd, y)


RUNGS: dict[str, Callable[..., None]] = {
    "1 a thread for each group": thread_each,
    "2 a block for each group": block_each,
    "3 16 bytes, several groups": sixteen_bytes,
}
