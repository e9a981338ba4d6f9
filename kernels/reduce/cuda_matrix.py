"""Parts of CUDA kernels for a matrix (rows, C): four neighbouring columns per thread, and sums over the rows.

A block that sums the rows has a strip of 16 columns and a part of the rows. Its threads form a grid: 4 lie side by
side and read 64 bytes of a row, in float32; 64 lie one below the other. Each thread adds every 64th row. Then the 64
sums of each column are added: those of a warp by shuffles, those of the warps in shared memory. So the order is fixed.

The sums of the parts are kept in float64, in `partial` (parts, columns). A second kernel adds them (`parts_sum`).
"""

from __future__ import annotations

from typing import Any

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import cuda, device
from minidl.engine.cuda_memory import get, load4, put, store4
from minidl.engine.device import address

from ..elementwise.quads import QUAD
from .block_sum import ALL, THREADS, WARP, WARPS

LANES = 4  # threads side by side
STRIP = LANES * QUAD  # columns of a block
HEIGHT = THREADS // LANES  # threads one below the other
STRIP_SUMS = WARPS * STRIP  # numbers of shared memory that `strip_sum` needs
PART_SUMS = WARPS * WARP  # the same for `parts_sum`


def wide(channels: int, *arrays: ndarray) -> bool:
    """Return whether quads of these arrays may be accessed by 16 bytes. channels: the length of their rows."""
    return channels % QUAD == 0 and all(address(a) % 16 == 0 for a in arrays)


def strips(channels: int) -> int:
    """Return the number of strips."""
    return -(-channels // STRIP)


@device
def load_part(array: ndarray, at: int, count: int, wide: bool, quad: ndarray) -> None:
    """quad = array[at : at + 4]. Elements from at + count on belong to the next row: they count as 0."""
    if wide:
        if count > 0:
            quad[0], quad[1], quad[2], quad[3] = load4(array, at)
    else:
        for j in range(QUAD):
            quad[j] = get(array, at + j) if j < count else array.dtype.type(0)


@device
def store_part(array: ndarray, at: int, count: int, wide: bool, quad: ndarray) -> None:
    """array[at : at + 4] = quad, without elements from at + count on"""
    if wide:
        if count > 0:
            store4(array, at, (quad[0], quad[1], quad[2], quad[3]))
    else:
        for j in range(QUAD):
            if j < count:
                put(array, at + j, quad[j])


@device
def part_of(rows: int, part: int, parts: int) -> tuple[int, int]:
    """Return (first, end) of the rows of a part."""
    return int32(part * rows // parts), int32((part + 1) * rows // parts)


@device
def place() -> tuple[int, int]:
    """Return a thread's (row, first column) within the strip."""
    return int32(cuda.threadIdx.x // LANES), int32(cuda.threadIdx.x % LANES * QUAD)


@device
def strip_sum(values: ndarray, sums: ndarray) -> Any:
    """Sum each of the four values over the threads with the same columns. Thread i < STRIP gets the sum of column i.

    sums: shared memory for STRIP_SUMS numbers.
    """
    thread = int32(cuda.threadIdx.x)
    warp, lane = thread // WARP, thread % WARP
    cuda.syncthreads()  # the previous sums have been read
    for j in range(QUAD):
        value = values[j]
        value += cuda.shfl_xor_sync(ALL, value, 16)
        value += cuda.shfl_xor_sync(ALL, value, 8)
        value += cuda.shfl_xor_sync(ALL, value, 4)
        if lane < LANES:
            sums[warp * STRIP + lane * QUAD + j] = value
    cuda.syncthreads()
    column = thread % STRIP
    total = sums[column]
    for w in range(1, WARPS):
        total += sums[w * STRIP + column]
    return total


@device
def parts_sum(partial: ndarray, column: int, columns: int, parts: int, sums: ndarray) -> Any:
    """Return the sum of a column of partial (parts, columns): to each warp that of column + lane.

    A warp adds every eighth part. sums: shared memory for PART_SUMS numbers.
    """
    thread = int32(cuda.threadIdx.x)
    warp, lane = thread // WARP, thread % WARP
    total = partial.dtype.type(0)
    if column < columns:
        for part in range(warp, parts, WARPS):
            total += get(partial, part * columns + column)
    cuda.syncthreads()  # the previous sums have been read
    sums[thread] = total
    cuda.syncthreads()
    total = sums[lane]
    for w in range(1, WARPS):
        total += sums[w * WARP + lane]
    return total
