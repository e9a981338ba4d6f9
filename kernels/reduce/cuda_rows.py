"""Parts of CUDA kernels for the rows of a matrix: a warp for each short row, a block for each long one.

Such a kernel passes over its row several times: first for a sum or a maximum, at last for the output. The first pass
keeps what it has loaded in shared memory. So a row of up to CACHED numbers is read from global memory once; the rest of
a longer row is read again. Each thread reads only what it has kept itself: this needs no barrier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import cuda, device, kernel, launch
from minidl.engine.cuda_memory import get, load4, store4

from ..elementwise.quads import QUAD
from .block_sum import ALL, THREADS, WARP, WARPS, block_sum, warp_sum
from .cuda_matrix import load_part

CACHED = 2048  # numbers of shared memory for the rows of a block


@device
def warp_maximum(value: Any) -> Any:
    value = max(value, cuda.shfl_xor_sync(ALL, value, 16))
    value = max(value, cuda.shfl_xor_sync(ALL, value, 8))
    value = max(value, cuda.shfl_xor_sync(ALL, value, 4))
    value = max(value, cuda.shfl_xor_sync(ALL, value, 2))
    return max(value, cuda.shfl_xor_sync(ALL, value, 1))


@device
def block_maximum(value: Any, found: ndarray) -> Any:
    value = warp_maximum(value)
    cuda.syncthreads()  # the previous maximum has been read
    if cuda.threadIdx.x % WARP == 0:
        found[cuda.threadIdx.x // WARP] = value
    cuda.syncthreads()
    largest = found[0]
    for warp in range(1, WARPS):
        largest = max(largest, found[warp])
    return largest


@device
def comes_first(value: float, k: int, best: float, where: int) -> bool:
    """Return whether `value`, with index k, is the maximum rather than `best`: it is larger, or equal and further
    ahead. NaN counts as larger than all numbers."""
    if value != value or best != best:
        return value != value and (best == best or k < where)
    return value > best or (value == best and k < where)


@device
def warp_first(best: Any, where: Any) -> Any:
    """Return the maximum of the warp and its index, where each thread has found one."""
    for step in range(5):
        distance = int32(16 >> step)
        value, k = cuda.shfl_xor_sync(ALL, best, distance), cuda.shfl_xor_sync(ALL, where, distance)
        if comes_first(value, k, best, where):
            best, where = value, k
    return best, where


@device
def row_first(x: ndarray, begin: int, n: int) -> Any:
    """Return the maximum of x[begin : begin + n] and its index, which a warp finds."""
    lane = int32(cuda.threadIdx.x % WARP)
    where = int32(lane if lane < n else 0)
    best = get(x, int32(begin + where))
    for k in range(lane + WARP, n, WARP):
        value = get(x, int32(begin + k))
        if comes_first(value, int32(k), best, where):
            best, where = value, int32(k)
    return warp_first(best, where)


@dataclass(frozen=True)
class Row:
    """What a kernel for rows needs: `threads` work on a row. All members are device functions.

    position() -> (row, the thread's first element, where the row begins in the cache)
    total(value, shared), largest(value, shared): over the threads of a row; shared has WARPS elements
    keep(cache, base, c, quad): remember the elements c to c + 3 of the row
    again(cache, base, array, at, c, count, wide, quad): load them again; the parameters of `load_part`
    """

    threads: int
    position: Any
    total: Any
    largest: Any
    keep: Any
    again: Any


def _row(threads: int) -> Row:
    cached = CACHED * threads // THREADS

    @device
    def position() -> tuple[int, int, int]:
        thread = int32(cuda.threadIdx.x)
        within = thread // threads  # the number of the row in the block
        return int32(cuda.blockIdx.x * (THREADS // threads) + within), thread % threads * QUAD, within * cached

    @device
    def keep(cache: ndarray, base: int, c: int, quad: ndarray) -> None:
        if c < cached:
            store4(cache, base + c, (quad[0], quad[1], quad[2], quad[3]))

    @device
    def again(
        cache: ndarray, base: int, array: ndarray, at: int, c: int, count: int, wide: bool, quad: ndarray
    ) -> None:
        if c < cached:
            quad[0], quad[1], quad[2], quad[3] = load4(cache, base + c)
        else:
            load_part(array, at, count, wide, quad)

    if threads == THREADS:
        return Row(threads, position, block_sum, block_maximum, keep, again)
    total = device(lambda value, shared: warp_sum(value))
    return Row(threads, position, total, device(lambda value, shared: warp_maximum(value)), keep, again)


def row_kernels(make: Callable[[Row], Callable[..., None]]) -> Callable[..., None]:
    """Return launch_rows(rows, columns, arguments): it launches the kernel `make(row)` for short or for long rows."""
    short, long = (kernel(THREADS)(make(_row(threads))) for threads in (WARP, THREADS))

    def launch_rows(rows: int, columns: int, *arguments: Any) -> None:
        if columns * WARPS <= CACHED:
            launch(short, -(-rows // WARPS), *arguments)
        else:
            launch(long, rows, *arguments)

    return launch_rows
