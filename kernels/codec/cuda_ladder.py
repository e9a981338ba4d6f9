"""The steps of README.md for a GPU: int8 codes of a vector of float32, in blocks of 4,096 elements.

`python tests/cuda/facts.py codec` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import float32, int32
from numpy import ndarray

from minidl.engine.cuda import cuda, device, kernel, launch
from minidl.engine.cuda_memory import get, put
from minidl.engine.cuda_numbers import rounded_product

from ..reduce.block_sum import THREADS, WARPS
from ..reduce.cuda_rows import block_maximum
from . import cuda as fast
from .cuda import _blocks
from .reference import BLOCK


@device
def _encode(rest: ndarray, i: int, scale: float, codes: ndarray) -> None:
    x = get(rest, i)
    code = cuda.libdevice.rintf(x / scale) if scale > float32(0) else float32(0)
    put(codes, i, np.int8(int32(code)))
    put(rest, i, x - rounded_product(code, scale))


@kernel(threads=THREADS)
def _naive(rest: ndarray, scales: ndarray, codes: ndarray) -> None:
    block = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
    if block < scales.size:
        begin, largest = int32(block * BLOCK), float32(0)
        end = int32(min(begin + BLOCK, rest.size))
        for i in range(begin, end):
            largest = max(largest, abs(get(rest, i)))
        scale = largest / float32(127)
        put(scales, block, scale)
        for i in range(begin, end):
            _encode(rest, i, scale, codes)


def naive(rest: ndarray, scales: ndarray, codes: ndarray) -> None:
    """A thread for each block of elements: it reads them for the scale, and again for the codes."""
    launch(_naive, -(-_blocks(rest) // THREADS), rest, scales, codes)


@kernel(threads=THREADS)
def _coalesced(rest: ndarray, scales: ndarray, codes: ndarray) -> None:
    shared = cuda.shared.array(WARPS, float32)
    block, thread, largest = int32(cuda.blockIdx.x), int32(cuda.threadIdx.x), float32(0)
    begin = int32(block * BLOCK)
    end = int32(min(begin + BLOCK, rest.size))
    for i in range(begin + thread, end, THREADS):
        largest = max(largest, abs(get(rest, i)))
    scale = block_maximum(largest, shared) / float32(127)
    if thread == 0:
        put(scales, block, scale)
    for i in range(begin + thread, end, THREADS):
        _encode(rest, i, scale, codes)


def coalesced(rest: ndarray, scales: ndarray, codes: ndarray) -> None:
    """256 threads for each block of elements. Neighbouring threads read neighbours, but still twice."""
    launch(_coalesced, _blocks(rest), rest, scales, codes)


RUNGS: dict[str, Callable[[ndarray, ndarray, ndarray], None]] = {
    "1 naive": naive,
    "2 coalesced": coalesced,
    "3 16 bytes, kept in registers": fast.int8_encode,
}
