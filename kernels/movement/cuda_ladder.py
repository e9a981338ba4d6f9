"""The steps of README.md for a GPU: target (columns, rows) = the transpose of source (rows, columns) in float32.

`python tests/cuda/facts.py movement` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import int32
from numpy import ndarray

from minidl.engine.cuda import Kernel, kernel, launch
from minidl.engine.cuda_memory import get, put

from ..elementwise.cuda_ladder import own
from ..reduce.block_sum import THREADS
from . import cuda as fast


@kernel(threads=THREADS)
def _read_in_order(source: ndarray, rows: int, columns: int, target: ndarray) -> None:
    i = own()
    if i < source.size:
        put(target, int32(i % columns * rows + i // columns), get(source, i))


def in_order_of_source(source: ndarray, target: ndarray) -> None:
    """A thread for each number of the source: a warp reads 128 successive bytes, and writes to 32 sectors."""
    _launch(_read_in_order, source, target)


@kernel(threads=THREADS)
def _write_in_order(source: ndarray, rows: int, columns: int, target: ndarray) -> None:
    i = own()
    if i < target.size:
        put(target, i, get(source, int32(i % rows * columns + i // rows)))


def in_order_of_target(source: ndarray, target: ndarray) -> None:
    """A thread for each number of the target: a warp reads from 32 sectors, and writes 128 successive bytes."""
    _launch(_write_in_order, source, target)


def tiles(source: ndarray, target: ndarray) -> None:
    """Call cuda.py: tiles of 32 x 32 go through shared memory."""
    rows, columns = source.shape
    strides, shape = (np.array([1, columns]), np.array([rows, 1])), np.array([columns, rows])
    fast.copy(source.reshape(-1), 0, strides[0], shape, 0, strides[1], target.reshape(-1))


def _launch(compute: Kernel, source: ndarray, target: ndarray) -> None:
    launch(compute, -(-source.size // THREADS), source, *source.shape, target)


RUNGS: dict[str, Callable[[ndarray, ndarray], None]] = {
    "1 in the order of the source": in_order_of_source,
    "2 in the order of the target": in_order_of_target,
    "3 tiles in shared memory": tiles,
}
